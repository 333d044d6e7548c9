"""Decoder layers for a decode step with few rows, in five kernels per layer rather than ten.

Such a step takes as long as reading the weights, plus what each launch costs. The plain path has separate kernels for
two norms, rotary embedding, activation and the combination of attention's splits. Here they are part of the products
before or after them, and of attention. Values are rounded at the same places as in the plain path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.engine.attention import PagedAttention
from headwater.engine.kernels.norm import rms_norm
from headwater.engine.kernels.skinny_pairs import MAX_ROWS, NormedRows, normed_gate_up, normed_qkv
from headwater.engine.kernels.skinny_sums import add_product, make_arrived, prepare_norm
from headwater.engine.kv_cache import KVCache
from headwater.engine.runners.decoder import DecoderOps, FusedLayer, Rotary


class SkinnyLayers:
    """Runs the layers of passes with at most ``max_rows`` rows."""

    def __init__(self, ops: DecoderOps, max_rows: int, device: torch.device) -> None:
        assert max_rows <= MAX_ROWS, f"max_rows = {max_rows}: the kernels handle at most {MAX_ROWS}"
        self._ops, self._max_rows = ops, max_rows
        self._arrived = make_arrived(device)  # shared by kernels that follow each other on one stream

    def fits(self, layers: Sequence[FusedLayer], residual: Tensor) -> bool:
        """Adapters need the normed rows themselves, and a narrow residual stream is rounded at more places."""
        return (
            len(residual) <= self._max_rows
            and residual.dtype == torch.float32
            and all(
                each.adapters is None
                for layer in layers
                for each in (layer.qkv, layer.output, layer.gate_up, layer.down)
            )
        )

    def counters(self, num_rows: int) -> Tensor | None:
        """The counters with which attention combines its splits itself; None with too many rows."""
        return self._arrived if num_rows <= self._max_rows else None

    def __call__(
        self,
        layers: Sequence[FusedLayer],
        final_norm: Tensor,
        residual: Tensor,
        rotary: Rotary,
        slots: Tensor,
        attention: PagedAttention,
        cache: KVCache,
    ) -> Tensor:
        """The last hidden states of ``residual``, the embeddings, which are overwritten."""
        normed = prepare_norm(residual, layers[0].input_norm, layers[0].eps)
        next_norms = [layer.input_norm for layer in layers[1:]] + [final_norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            query = self._query(layer, normed, rotary, slots, cache, index)
            attended = attention(index, query, scale=layer.scale, window=layer.window).flatten(1)
            output, down = layer.output, layer.down
            normed = add_product(
                attended, output.weight, output.bias, residual, layer.post_norm, layer.eps, self._arrived
            )
            gated = normed_gate_up(normed, layer.gate_up.weight, layer.gate_up.bias)
            normed = add_product(gated, down.weight, down.bias, residual, next_norm, layer.eps, self._arrived)
        return rms_norm(residual, final_norm, layers[-1].eps)

    def _query(
        self, layer: FusedLayer, normed: NormedRows, rotary: Rotary, slots: Tensor, cache: KVCache, index: int
    ) -> Tensor:
        rotate = layer.head_norms is None  # a head norm needs the whole head, which is in several programs
        product = normed_qkv(
            normed,
            layer.qkv.weight,
            layer.qkv.bias,
            (rotary.cos, rotary.sin),
            rotary.positions,
            slots,
            cache.layer(index),
            cache.spec.num_heads,
            rotate=rotate,
        )
        if rotate:
            return product
        return self._ops.rope_and_store(product, rotary, slots, cache, index, layer.head_norms)
