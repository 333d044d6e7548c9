"""A decoder as a few large operations: merged projections, and one pass each for norms, rotary and activation.

The weights are those of the transformers model. Projections that read the same input are merged in memory, and the
model's parameters become views of the merged tensors, so names, checkpoints and weight updates do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.engine.adapters import AdapterParts
from headwater.engine.attention import PagedAttention
from headwater.engine.kv_cache import KVCache
from headwater.engine.media import MediaInputs
from headwater.engine.model_spec import ModelSpec
from headwater.models.precision import is_wide, wide_linear


class DecoderOps(Protocol):
    """The operations of a decoder layer on one device."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    def wide_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``linear`` with a result in float32."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """In the type of ``weight``. ``x`` may be float32 in any case."""
        ...

    def linear_add_rms_norm(
        self, x: Tensor, projection: Projection, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        """Add the product of ``x`` to ``residual`` in place and return the norm of the sum, in the weight's type."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...
    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``silu_and_mul`` of ``linear``."""
        ...

    def rope_and_store(
        self, qkv: Tensor, rotary: Rotary, slots: Tensor, cache: KVCache, layer: int, norms: HeadNorms | None
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to their slots, return the queries."""
        ...


@dataclass
class Rotary:
    """Rotary tables for all positions, and the positions of this pass."""

    cos: Tensor
    sin: Tensor
    positions: Tensor

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of this pass, gathered once for all layers."""
        return self.cos[self.positions], self.sin[self.positions]


@dataclass(frozen=True)
class HeadNorms:
    """Norms of the query and key heads, as in Qwen3."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True)
class Projection:
    """A linear layer, possibly merged from several."""

    weight: Tensor
    bias: Tensor | None
    adapters: AdapterParts | None = None
    """LoRA adapters, whose products are added to the layer's."""


@dataclass(frozen=True)
class FusedLayer:
    """The weights and settings of one decoder layer."""

    input_norm: Tensor
    qkv: Projection
    head_norms: HeadNorms | None
    output: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection
    eps: float
    scale: float
    window: int


class FusedDecoder:
    """Runs a Llama-like transformers decoder (see ``model_spec.FUSED``)."""

    def __init__(self, model: Any, spec: ModelSpec, ops: DecoderOps) -> None:
        decoder, config = model.get_decoder(), model.config.get_text_config()
        self._ops = ops
        self._embedding = decoder.embed_tokens.weight
        self._has_wide_residual = is_wide("residual", config, spec.dtype)
        self._layers = [_fuse(layer, config) for layer in decoder.layers]
        self._final_norm = decoder.norm.weight
        self._rotary_embedding = decoder.rotary_emb
        self._cos, self._sin = _rotary_tables(decoder, spec)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: PagedAttention,
        cache: KVCache,
        media: MediaInputs | None = None,
    ) -> Tensor:
        ops, rotary = self._ops, self._rotary(positions, media)
        residual = nn.functional.embedding(input_ids, self._embedding)
        if self._has_wide_residual:
            residual = residual.float()
        if media is not None:
            residual[media.places] = media.embeddings.to(residual.dtype)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, self._layers[0].eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            query = self._query(hidden, layer, rotary, slots, cache, index)
            attended = attention(index, query, scale=layer.scale, window=layer.window).flatten(1)
            if layer.output.adapters is not None:
                layer.output.adapters.add_to(residual, attended)
            hidden = ops.linear_add_rms_norm(attended, layer.output, residual, layer.post_norm, layer.eps)
            gated = self._gated(hidden, layer.gate_up)
            if layer.down.adapters is not None:
                layer.down.adapters.add_to(residual, gated)
            if media is not None and index < len(media.deep):
                residual[media.places] += media.deep[index].to(residual.dtype)
            hidden = ops.linear_add_rms_norm(gated, layer.down, residual, next_norm, layer.eps)
        return hidden

    def _rotary(self, positions: Tensor, media: MediaInputs | None) -> Rotary:
        if media is None or media.rotary is None:
            return Rotary(self._cos, self._sin, positions)
        # Tables of this pass alone, with one row per token.
        first = torch.zeros(1, device=positions.device)
        cos, sin = self._rotary_embedding(first, media.rotary[:, None])
        return Rotary(cos[0].contiguous(), sin[0].contiguous(), torch.arange(len(positions), device=positions.device))

    def merged_weights(self) -> Iterator[Tensor]:
        """The tensors that several parameters of the model are views of."""
        for layer in self._layers:
            for projection in (layer.qkv, layer.output, layer.gate_up, layer.down):
                down = projection.adapters.down if projection.adapters is not None else None
                for each in (projection.weight, projection.bias, down):
                    if each is not None and not isinstance(each, nn.Parameter):
                        yield each

    def _query(self, x: Tensor, layer: FusedLayer, rotary: Rotary, slots: Tensor, cache: KVCache, index: int) -> Tensor:
        qkv = self._linear(x, layer.qkv)
        return self._ops.rope_and_store(qkv, rotary, slots, cache, index, layer.head_norms)

    def _gated(self, x: Tensor, projection: Projection) -> Tensor:
        if projection.adapters is None:
            return self._ops.gated_linear(x, projection.weight, projection.bias)
        return self._ops.silu_and_mul(self._linear(x, projection))

    def _linear(self, x: Tensor, projection: Projection) -> Tensor:
        product = self._ops.linear(x, projection.weight, projection.bias)
        return product if projection.adapters is None else projection.adapters.add_to(product, x)


def _fuse(layer: Any, config: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention, "sliding_window", None)
    if config.model_type == "mistral":
        window = config.sliding_window
    norms = None
    if hasattr(attention, "q_norm"):
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
    return FusedLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_merge(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=norms,
        output=_merge(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_merge(mlp.gate_proj, mlp.up_proj),
        down=_merge(mlp.down_proj),
        eps=layer.input_layernorm.variance_epsilon,
        scale=attention.scaling,
        window=window or 0,
    )


@torch.no_grad()
def _merge(*projections: nn.Linear) -> Projection:
    """Stack the projections into one. The parameters of the model become views of it."""
    weight = _stack([projection.weight for projection in projections])
    biases = [projection.bias for projection in projections]
    return Projection(weight, _stack(biases) if biases[0] is not None else None, AdapterParts.of(projections))


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0]
    merged = torch.cat([parameter.detach() for parameter in parameters])
    parts = torch.split(merged, [len(each) for each in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return merged


@torch.no_grad()
def _rotary_tables(decoder: Any, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    positions = torch.arange(spec.max_positions, device=spec.device)[None]
    if spec.uses_grid:
        positions = positions.expand(3, 1, -1)
    # The first argument only determines the dtype and device of the result.
    cos, sin = decoder.rotary_emb(torch.zeros(1, device=spec.device), positions)
    return cos[0].contiguous(), sin[0].contiguous()


class CpuOps:
    """The operations in plain torch, for a CPU."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def wide_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return wide_linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        mean_square = norm.square_().div_(x.shape[-1])
        normalised = wide * mean_square.add_(eps).rsqrt_()
        if x.dtype != weight.dtype:
            return (weight.float() * normalised).to(weight.dtype)  # a wide residual is rounded once
        return weight * normalised.to(x.dtype)

    def linear_add_rms_norm(
        self, x: Tensor, projection: Projection, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        product = self.linear if residual.dtype == x.dtype else self.wide_linear
        return self.rms_norm(residual.add_(product(x, projection.weight, projection.bias)), norm_weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_and_mul(self.linear(x, weight, bias))

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
    """Rotate ``[tokens, heads, head dim]`` by the tokens' angles. The second half of the tables repeats the first."""
    half = heads.shape[-1] // 2
    output = heads * cos[:, None]
    sin = sin[:, None, :half]
    output[..., :half].addcmul_(heads[..., half:], sin, value=-1)
    output[..., half:].addcmul_(heads[..., :half], sin)
    return output.to(heads.dtype)
