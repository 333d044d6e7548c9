"""A float32 residual stream and float32 rotary embeddings in the decoder layers of transformers.

The layers add what they compute in bfloat16 or float16 to a float32 sum, as the engine does (``models.precision``).
Only the norms read the sum, and they round once. On CUDA, a Triton kernel adds and norms in one pass
(``norm_kernels``); ``plain_norm`` and the layers' own forward pass compute the same in plain torch.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headwater.models.precision import is_wide

_Stream = Tensor | tuple[Tensor, Tensor]
"""What a layer passes on: the float32 sum, or the sum and what the next norm has to add to it."""
_DEFERRING = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose decoder does nothing with the stream between two layers."""


def widen_layers(model: Any, dtype: torch.dtype, *, uses_kernels: bool, defers: bool = False) -> bool:
    """Widen the layers of ``model``, which compute in ``dtype``, in place. False if nothing is to be widened.

    With kernels and ``defers``, the second addition of a layer is left to the first norm of the next one.
    """
    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    has_wide_rotary, has_wide_residual = (is_wide(part, config, dtype) for part in ("rotary", "residual"))
    if has_wide_rotary or has_wide_residual:
        _set_rotary_type(decoder.rotary_emb, torch.float32 if has_wide_rotary else dtype)
    if has_wide_residual:
        decoder.embed_tokens.register_forward_hook(_to_float32)
        norms = [each for layer in decoder.layers for each in (layer.input_layernorm, layer.post_attention_layernorm)]
        for norm in (*norms, decoder.norm):
            norm.forward = MethodType(_fused_norm if uses_kernels else plain_norm, norm)
        forward = _deferring_forward if defers and config.model_type in _DEFERRING else _fused_forward
        for layer in decoder.layers if uses_kernels else ():
            layer.forward = MethodType(forward, layer)
    return has_wide_rotary or has_wide_residual


def plain_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """The RMS norm of a float32 sum, rounded once, to the type in which the layers compute."""
    mean_square = hidden_states.pow(2).mean(-1, keepdim=True)
    normalised = hidden_states * torch.rsqrt(mean_square + norm.variance_epsilon)
    weight: Tensor = norm.weight
    return (weight.float() * normalised).to(weight.dtype)


def _fused_norm(norm: Any, stream: _Stream) -> Tensor:
    return _add_and_norm(norm, stream)[1]


def _fused_forward(layer: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """The forward pass of a layer, with the first addition in the kernel of the second norm."""
    residual, product = _deferring_forward(layer, hidden_states, **options)
    return residual + product


def _deferring_forward(layer: Any, hidden_states: _Stream, **options: Any) -> tuple[Tensor, Tensor]:
    """The same without the second addition, which the kernel of the next norm makes."""
    residual, normed = _add_and_norm(layer.input_layernorm, hidden_states)
    product, _ = layer.self_attn(hidden_states=normed, **options)
    residual, normed = _add_and_norm(layer.post_attention_layernorm, (residual, product))
    return residual, layer.mlp(normed)


def _add_and_norm(norm: Any, stream: _Stream) -> tuple[Tensor, Tensor]:
    from headwater.learner.norm_kernels import add_and_norm  # needs Triton

    residual, product = stream if isinstance(stream, tuple) else (stream, None)
    return add_and_norm(residual, product, norm.weight, norm.variance_epsilon)


def _set_rotary_type(rotary: nn.Module, dtype: torch.dtype) -> None:
    """Make the tables in ``dtype``. Their type is that of the first argument, of which nothing else is used."""

    def replace_first(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        first, *rest = arguments
        return (first.new_empty(0, dtype=dtype), *rest), options

    rotary.register_forward_pre_hook(replace_first, with_kwargs=True)


def _to_float32(module: Any, arguments: Any, output: Tensor) -> Tensor:
    return output.float()
