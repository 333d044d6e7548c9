"""The fused decoder's operations on CUDA: cuBLAS for products, our Triton kernels for the rest."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.matmul import invariant_linear
from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.split_linear import split_linear, suggest_slices
from headwater.engine.kv_cache import KVCache
from headwater.engine.runners.decoder import HeadNorms, Projection, Rotary


class CudaOps:
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def linear_add_rms_norm(
        self, x: Tensor, projection: Projection, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        slices = suggest_slices(x.shape[0], *projection.weight.shape)
        if slices > 1:
            parts = split_linear(x, projection.weight, slices)
            return sum_add_rms_norm(parts, projection.bias, residual, norm_weight, eps)
        product = F.linear(x, projection.weight, projection.bias)
        return add_rms_norm(product, residual, norm_weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)

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
        )


class InvariantCudaOps(CudaOps):
    """Products in fixed tiles, so that a token's bits do not depend on how many others there are."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return invariant_linear(x, weight, bias)

    def linear_add_rms_norm(
        self, x: Tensor, projection: Projection, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        # Never in slices: how a sum is cut would depend on the number of rows.
        product = invariant_linear(x, projection.weight, projection.bias)
        return add_rms_norm(product, residual, norm_weight, eps)
