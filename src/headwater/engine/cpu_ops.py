"""The fused decoder's operations in plain torch, for the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.engine.fused_decoder import HeadNorms, Rotary
from headwater.engine.kv_cache import KVCache


class CpuOps:
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        mean_square = norm.square_().div_(x.shape[-1])
        return weight * (wide * mean_square.add_(eps).rsqrt_()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rope_and_store(
        self, qkv: Tensor, rotary: Rotary, slots: Tensor, cache: KVCache, layer: int, norms: HeadNorms | None
    ) -> Tensor:
        spec = cache.spec
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        query, key, value = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if norms is not None:
            query, key = self.rms_norm(query, norms.query, norms.eps), self.rms_norm(key, norms.key, norms.eps)
        cos = rotary.cos[rotary.positions][:, None]
        sin = rotary.sin[rotary.positions][:, None]
        cache.store(layer, _rotate(key, cos, sin), value, slots)
        return _rotate(query, cos, sin)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    turned = torch.cat((-second, first), dim=-1)
    return (heads * cos + turned * sin).to(heads.dtype)
