"""Fused norms, rotary embeddings and gated products for training on CUDA, from Liger if it is installed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from types import MethodType
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

_SILU, _GELU = frozenset({"silu", "swish"}), frozenset({"gelu_pytorch_tanh"})
_ACTIVATIONS = {
    "llama": _SILU,
    "mistral": _SILU,
    "qwen2": _SILU,
    "qwen3": _SILU,
    "gemma": _GELU,
    "gemma3_text": _GELU,
}
"""The tested architectures, with the activations that Liger computes. Liger ignores the model's setting."""
_ROTARY = "apply_rotary_pos_emb"


def use_fused_layers(model: Any) -> bool:
    """Use Liger's kernels in the layers of this model only. Log the reason and return False if that is not possible."""
    reason = _reason_against(model)
    if reason is None:
        reason = _fuse(model)
    if reason is not None:
        logger.warning("training uses unfused, slower layers: %s", reason)
    return reason is None


def _reason_against(model: Any) -> str | None:
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed; pip install 'headwater[cuda]', or set learner.fused_layers=false"
    config = model.config
    if config.model_type not in _ACTIVATIONS:
        return f"fused layers are tested with {', '.join(_ACTIVATIONS)}, not with {config.model_type}"
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in _ACTIVATIONS[config.model_type]:
        return f"{config.model_type} with the activation {activation} is not supported by Liger"
    return None


def _fuse(model: Any) -> str | None:
    """Let Liger change ``model``. If it refuses, return the reason and leave the model unchanged."""
    # Liger warns about every backend that is not available when an operation is first used.
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    from transformers.integrations.liger import apply_liger_kernel

    decoder = model.get_decoder()
    modeling = sys.modules[type(decoder).__module__]
    before = dict(vars(modeling))
    try:
        # Log-probs are computed from hidden states, so Liger's losses are not used.
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    except TypeError as error:  # the class around the decoder is unknown to Liger
        return str(error)
    finally:
        _keep_to_instance(modeling, before)
    for layer in decoder.layers:
        layer.self_attn.forward = MethodType(_forward_with_fused_rotary, layer.self_attn)
    return None


# Liger replaces classes and the rotary function in transformers' module, which all models of an architecture share.
# Other models may be on a CPU, where Liger cannot run, or may have to stay unfused.

_is_rotary_fused: ContextVar[bool] = ContextVar("is_rotary_fused", default=False)


@dataclass(frozen=True)
class _Rotary:
    """The rotary function of a transformers module: fused in the attention of a fused model, plain otherwise."""

    plain: Callable[..., tuple[Tensor, Tensor]]
    fused: Callable[..., tuple[Tensor, Tensor]]

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return (self.fused if _is_rotary_fused.get() else self.plain)(*arguments, **options)


def _keep_to_instance(modeling: Any, before: dict[str, Any]) -> None:
    """Restore ``modeling``, except for a rotary function that distinguishes between fused and other models."""
    plain, fused = before.get(_ROTARY), vars(modeling).get(_ROTARY)
    for name, value in before.items():
        setattr(modeling, name, value)
    if plain is not None and fused is not None and fused is not plain and not isinstance(plain, _Rotary):
        setattr(modeling, _ROTARY, _Rotary(plain, fused))


def _forward_with_fused_rotary(attention: Any, *arguments: Any, **options: Any) -> Any:
    reset = _is_rotary_fused.set(True)
    try:
        return type(attention).forward(attention, *arguments, **options)
    finally:
        _is_rotary_fused.reset(reset)
