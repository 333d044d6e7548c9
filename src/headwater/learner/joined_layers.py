"""Decoder layers whose projections of the same input are one product: q, k and v, and gate and up.

``join_projections`` changes the layers of a transformers model in place. Parameters keep their names and places, so
checkpoints, adapters and weight updates see no difference. Layers with adapters, and attention with norms of queries
and keys, stay as they are. On CUDA, kernels compute what is between the products (``joined_kernels``);
``_plain_heads`` and ``_plain_gated`` compute the same in plain torch.

    joined = joined_linear(x, [attention.q_proj, attention.k_proj, attention.v_proj])   # [..., q + k + v]

The forward pass is one product instead of three, and so are the gradients of the input and of the weights. The gradient
of the input is rounded once, where torch rounds one per layer and adds them. If the weights lie one after the other in
memory, as ``working_copies`` places them, they are one matrix already; otherwise they are copied into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.models.packed_attention import attend
from headwater.models.precision import has_wide_layers

_ATTENTION: dict[str, Callable[[Any], int | None]] = {
    "LlamaAttention": lambda attention: None,
    "MistralAttention": lambda attention: getattr(attention.config, "sliding_window", None),
    "Qwen2Attention": lambda attention: attention.sliding_window,
}
"""The classes of attention that are joined, and where each has its sliding window."""
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_JOINED = "_joined_projections"
"""The attribute of a changed module that names its joined layers."""


def join_projections(model: Any, dtype: torch.dtype, *, uses_kernels: bool) -> int:
    """Change the layers of ``model``, which compute in ``dtype``, in place. Returns how many modules were changed.

    Weights that have this type already, such as those below adapters, have no working copies, and would have to be
    copied together in every pass. They stay separate.
    """
    decoder = model.get_decoder()
    if not has_wide_layers(model.config.get_text_config(decoder=True)):  # those are the layers that are known here
        return 0
    changed = 0
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if type(attention).__name__ in _ATTENTION and _is_whole(decoder, attention) and _joins(attention, _QKV, dtype):
            forward = _fused_attention if uses_kernels else _plain_attention
            attention.forward = MethodType(forward, attention)
            changed += 1
        if _joins(mlp, _GATE_UP, dtype):
            mlp.forward = MethodType(_fused_mlp if uses_kernels else _plain_mlp, mlp)
            changed += 1
    return changed


def joined_weights(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Parameters that are computed with as one, in the order in which they should be in memory."""
    for module in model.modules():
        names = getattr(module, _JOINED, ())
        layers = [getattr(module, name) for name in names]
        for parts in ([each.weight for each in layers], [each.bias for each in layers]):
            if parts and parts[0] is not None:
                yield parts


def _joins(module: Any, names: Sequence[str], dtype: torch.dtype) -> bool:
    layers = [getattr(module, name, None) for name in names]
    is_possible = can_be_joined(layers) and all(each.weight.dtype != dtype for each in layers)
    if is_possible:
        setattr(module, _JOINED, tuple(names))
    return is_possible


def _is_whole(decoder: Any, attention: Any) -> bool:
    """Whether all of a head is rotated."""
    frequencies = getattr(decoder.rotary_emb, "inv_freq", None)
    return frequencies is not None and 2 * len(frequencies) == attention.head_dim


def _fused_mlp(mlp: Any, x: Tensor) -> Tensor:
    from headwater.learner.joined_kernels import gated  # needs Triton

    return _mlp(mlp, x, gated)


def _plain_mlp(mlp: Any, x: Tensor) -> Tensor:
    return _mlp(mlp, x, _plain_gated)


def _mlp(mlp: Any, x: Tensor, gated: Callable[[Tensor], Tensor]) -> Tensor:
    output: Tensor = mlp.down_proj(gated(joined_linear(x, [mlp.gate_proj, mlp.up_proj])))
    return output


def _plain_gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


_Heads = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]


def _fused_attention(attention: Any, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
    from headwater.learner.joined_kernels import rotated_heads  # needs Triton

    return _attention(rotated_heads, attention, *arguments, **options)


def _plain_attention(attention: Any, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
    return _attention(_plain_heads, attention, *arguments, **options)


def _attention(
    rotated_heads: _Heads,
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The forward pass of attention over a pack, ``[1, tokens, hidden size]``."""
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    num_heads, num_kv_heads = (each.out_features // attention.head_dim for each in layers[:2])
    cos, sin = (each[0] for each in position_embeddings)
    heads = rotated_heads(joined_linear(hidden_states.squeeze(0), layers), cos, sin, num_heads, num_kv_heads)
    query, key, value = (each.transpose(0, 1)[None] for each in heads)
    window = _ATTENTION[type(attention).__name__](attention)
    options = {**options, "scaling": attention.scaling, "sliding_window": window}
    output, _ = attend(attention, query, key, value, attention_mask, **options)
    product: Tensor = attention.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
    return product, None


def _plain_heads(
    joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, the first two rotated in the type of the tables and rounded once."""
    heads = joined.view(len(joined), num_heads + 2 * num_kv_heads, -1)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return (x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]).to(x.dtype)

    return rotated(query), rotated(key), value


def joined_linear(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """The results of ``layers``, one after the other in the last dimension. Either all layers have a bias, or none."""
    parts = [each.weight for each in layers] + [each.bias for each in layers if each.bias is not None]
    result: Tensor = _JoinedLinear.apply(x, len(layers), *parts)  # type: ignore[no-untyped-call]
    return result


def can_be_joined(layers: Sequence[nn.Module | None]) -> TypeGuard[Sequence[nn.Linear]]:
    """Whether these are plain linear layers of the same kind. Layers with adapters are not."""
    plain = [each for each in layers if type(each) is nn.Linear]
    return len(plain) == len(layers) and len({each.bias is None for each in plain}) == 1


def joined(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parts)``, which is a view if they are one after the other in memory already."""
    first = parts[0]
    size = 0
    for each in parts:
        is_next = each.is_contiguous() and each.data_ptr() == first.data_ptr() + size * first.element_size()
        if not is_next or each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        size += each.numel()
    shape = (sum(len(each) for each in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_layers: int, *parts: Tensor) -> Tensor:
        weights, biases = parts[:num_layers], parts[num_layers:]
        # The parts are saved, not their join: they exist anyway, and FSDP frees and gathers their memory.
        ctx.save_for_backward(x, *weights)
        ctx.num_layers = num_layers
        return F.linear(x, joined(weights), joined(biases) if biases else None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        (gradient,) = gradients
        needs_x, _, *needs_parts = ctx.needs_input_grad
        needs_weights, needs_biases = needs_parts[: ctx.num_layers], needs_parts[ctx.num_layers :]
        sizes = [len(each) for each in weights]
        rows = gradient.reshape(-1, gradient.shape[-1])
        x_gradient = (rows @ joined(weights)).view_as(x) if needs_x else None
        of_weights: Sequence[Tensor | None] = [None] * len(needs_weights)
        if any(needs_weights):
            of_weights = torch.split(rows.T @ x.reshape(-1, x.shape[-1]), sizes)
        of_biases: Sequence[Tensor | None] = [None] * len(needs_biases)
        if any(needs_biases):
            of_biases = torch.split(rows.sum(dim=0), sizes)
        found = zip((*of_weights, *of_biases), needs_parts, strict=True)
        return x_gradient, None, *(each if is_needed else None for each, is_needed in found)
