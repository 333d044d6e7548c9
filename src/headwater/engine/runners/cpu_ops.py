"""The fused decoder's operations in plain torch, for the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.engine.kv_cache import KVCache
from headwater.engine.runners.decoder import HeadNorms, Projection, Rotary


class CpuOps:
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        mean_square = norm.square_().div_(x.shape[-1])
        return weight * (wide * mean_square.add_(eps).rsqrt_()).to(x.dtype)

    def linear_add_rms_norm(
        self, x: Tensor, projection: Projection, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        product = F.linear(x, projection.weight, projection.bias)
        return self.rms_norm(residual.add_(product), norm_weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rope_and_store(
        self, qkv: Tensor, rotary: Rotary, slots: Tensor, cache: KVCache, layer: int, norms: HeadNorms | None
    ) -> Tensor:
        spec = cache.spec
        num_rotated = spec.num_heads + spec.num_kv_heads
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if norms is not None:
            weights = torch.cat((norms.query.expand(spec.num_heads, -1), norms.key.expand(spec.num_kv_heads, -1)))
            rotated = self.rms_norm(rotated, weights, norms.eps)
        rotated = _rotate(rotated, *rotary.rows)
        cache.store(layer, rotated[:, spec.num_heads :], value, slots)
        return rotated[:, : spec.num_heads]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[tokens, heads, head dim]`` turned by the tokens' angles; the second half of the tables repeats the first."""
    half = heads.shape[-1] // 2
    output = heads * cos[:, None]
    sin = sin[:, None, :half]
    output[..., :half].addcmul_(heads[..., half:], sin, value=-1)
    output[..., half:].addcmul_(heads[..., :half], sin)
    return output.to(heads.dtype)
