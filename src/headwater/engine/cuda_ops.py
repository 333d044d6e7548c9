"""The fused decoder's operations on CUDA: cuBLAS for products, our Triton kernels for the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from headwater.engine.fused_decoder import HeadNorms, Projection, Rotary
from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.dependent_launch import supports_dependent_launch
from headwater.engine.kernels.matmul import invariant_linear
from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from headwater.engine.kernels.prefetch import PagedReads, Soon, supports_prefetch
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.split_linear import split_linear, suggest_slices
from headwater.engine.kv_cache import KVCache


class CudaOps:
    """``slices(rows, outputs, inputs)`` says into how many a product before a norm is cut; 1 leaves it to cuBLAS.

    ``dependent`` launches our kernels before their predecessors have ended, where the device can. Up to
    ``prefetch_bytes`` of the next weight are asked for early.
    """

    def __init__(
        self,
        *,
        slices: Callable[[int, int, int], int] = suggest_slices,
        dependent: bool = True,
        prefetch_bytes: int = 0,
    ) -> None:
        self._slices = slices
        self._wants_dependent = dependent
        self._prefetch_bytes = prefetch_bytes

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, dependent=self._dependent(x))

    def linear_add_rms_norm(
        self,
        x: Tensor,
        projection: Projection,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        then: Tensor | None = None,
        pages: PagedReads | None = None,
    ) -> Tensor:
        weight, bias = projection.weight, projection.bias
        slices = self._slices(x.shape[0], *weight.shape)
        dependent, soon = self._dependent(x), self._soon(then, pages)
        if slices > 1:
            parts = split_linear(x, weight, slices)
            return sum_add_rms_norm(parts, bias, residual, norm_weight, eps, dependent=dependent, soon=soon)
        product = self.linear(x, weight, bias)
        return add_rms_norm(product, residual, norm_weight, eps, dependent=dependent, soon=soon)

    def silu_and_mul(self, gate_up: Tensor, *, then: Tensor | None = None) -> Tensor:
        return silu_and_mul(gate_up, dependent=self._dependent(gate_up), soon=self._soon(then, None))

    def rope_and_store(
        self, qkv: Tensor, rotary: Rotary, slots: Tensor, cache: KVCache, layer: int, norms: HeadNorms | None
    ) -> Tensor:
        keys, values = cache.layer(layer)
        return rope_and_store(
            qkv,
            rotary.cos,
            rotary.sin,
            rotary.positions,
            slots,
            keys,
            values,
            cache.spec.num_heads,
            q_norm=None if norms is None else norms.query,
            k_norm=None if norms is None else norms.key,
            eps=0.0 if norms is None else norms.eps,
            dependent=self._dependent(qkv),
        )

    def _dependent(self, x: Tensor) -> bool:
        return self._wants_dependent and supports_dependent_launch(x.device)

    def _soon(self, weight: Tensor | None, pages: PagedReads | None) -> Soon | None:
        if weight is None or not self._prefetch_bytes or not supports_prefetch(weight.device):
            return None
        return Soon(weight, self._prefetch_bytes, pages)


class InvariantCudaOps(CudaOps):
    """Products in fixed tiles, so that a token's bits do not depend on how many others there are."""

    def __init__(self, *, dependent: bool = True) -> None:
        # How a sum is cut would depend on the number of rows.
        super().__init__(slices=lambda rows, outputs, inputs: 1, dependent=dependent)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return invariant_linear(x, weight, bias)
