"""Fused norms, rotary embeddings and gated products for training on CUDA, from Liger if it is installed.

Of a vision model, the language model is fused, and the tower if it is one of Qwen's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from headwater.models.vision.architecture import GATED_ALIGNMENT

logger = logging.getLogger(__name__)

_SILU, _GELU = frozenset({"silu", "swish"}), frozenset({"gelu_pytorch_tanh"})
_ACTIVATIONS = {
    "llama": _SILU,
    "mistral": _SILU,
    "qwen2": _SILU,
    "qwen3": _SILU,
    "gemma": _GELU,
    "gemma3_text": _GELU,
    "qwen2_5_vl": _SILU,
    "qwen3_vl": _SILU,
    "smolvlm": _SILU,
    "idefics3": _SILU,
}
"""The tested architectures, with the activations that Liger computes. Liger ignores the model's setting."""
_QWEN_VISION = ("qwen2_5_vl", "qwen3_vl")
_ROTARY = "apply_rotary_pos_emb"
_TOWER_ROTARY = "apply_rotary_pos_emb_vision"


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
    text = config.get_text_config(decoder=True)
    activation = getattr(text, "hidden_activation", None) or text.hidden_act
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
    is_qwen_vision = _is_qwen_vision(model)
    if is_qwen_vision and _ROTARY not in before:
        return f"those of {model.config.model_type} need transformers 5.17 or newer"
    # The language models of SmolVLM and Idefics3 are those of Llama, for which Liger has all kernels.
    fused = model if is_qwen_vision or not _is_vision(model) else decoder
    try:
        # Log-probs are computed from hidden states, so Liger's losses are not used.
        apply_liger_kernel(fused, {"cross_entropy": False, "fused_linear_cross_entropy": False})
        if is_qwen_vision:
            _fuse_qwen_vision(model, modeling)
    except TypeError as error:  # the class around the decoder is unknown to Liger
        return str(error)
    finally:
        _keep_to_instance(modeling, before)
    towers = [block.attn for block in _tower(model).blocks] if is_qwen_vision else []
    for attention in (*(layer.self_attn for layer in decoder.layers), *towers):
        attention.forward = MethodType(_forward_with_fused_rotary, attention)
    return None


def _fuse_qwen_vision(model: Any, modeling: Any) -> None:
    """What Liger leaves as it is. It expects rotary tables of time, height and width, as in older transformers."""
    from liger_kernel.transformers import LigerSwiGLUMLP, liger_rotary_pos_emb

    # The model mixes the three parts of its positions when it makes the tables, so the rotation is the usual one.
    setattr(modeling, _ROTARY, liger_rotary_pos_emb)
    setattr(modeling, _TOWER_ROTARY, fused_rotary)
    for layer in model.get_decoder().layers:
        layer.mlp.forward = MethodType(LigerSwiGLUMLP.forward, layer.mlp)
    fuse_gated_layers(_tower(model))


def _tower(model: Any) -> Any:
    return getattr(model, model.base_model_prefix).visual


def _is_vision(model: Any) -> bool:
    return getattr(model.config, "vision_config", None) is not None


def _is_qwen_vision(model: Any) -> bool:
    return model.config.model_type in _QWEN_VISION


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
    """Restore ``modeling``, except for rotary functions that distinguish between fused and other models."""
    replaced = {name: vars(modeling).get(name) for name in (_ROTARY, _TOWER_ROTARY)}
    for name in vars(modeling).keys() - before.keys():
        delattr(modeling, name)
    for name, value in before.items():
        setattr(modeling, name, value)
    for name, fused in replaced.items():
        plain = before.get(name)
        if plain is not None and fused is not None and fused is not plain and not isinstance(plain, _Rotary):
            setattr(modeling, name, _Rotary(plain, fused))


def _forward_with_fused_rotary(attention: Any, *arguments: Any, **options: Any) -> Any:
    reset = _is_rotary_fused.set(True)
    try:
        return type(attention).forward(attention, *arguments, **options)
    finally:
        _is_rotary_fused.reset(reset)


def fuse_gated_layers(visual: Any) -> None:
    """Gated layers, which Qwen2.5-VL's tower has and Qwen3-VL's has not, compute their products in aligned widths.

    Their width is 3420, for which cuBLAS has no fast kernels: it needs rows of eight bfloat16 numbers or a multiple of
    that. So their weights are filled up with zeros.
    """
    if visual.config.hidden_act not in _SILU:
        return
    for block in visual.blocks:
        if hasattr(block.mlp, "gate_proj"):
            block.mlp.forward = MethodType(_gated, block.mlp)


def fused_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotary function of the towers: ``[patches, heads, head dim]``, in float32, rounded once at the end."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    # The kernel computes in the type of the tables, and reads and writes queries and keys in theirs.
    rotated = liger_rotary_pos_emb(
        query[None].transpose(1, 2), key[None].transpose(1, 2), cos.float()[None], sin.float()[None]
    )
    query, key = (each.transpose(1, 2)[0] for each in rotated)
    return query, key


def _gated(mlp: Any, hidden_state: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    missing = -mlp.gate_proj.out_features % GATED_ALIGNMENT
    if not missing or any(type(each) is not nn.Linear for each in layers):  # adapters have their own products
        gated: Tensor = LigerSiLUMulFunction.apply(mlp.gate_proj(hidden_state), mlp.up_proj(hidden_state))
        output: Tensor = mlp.down_proj(gated)
        return output
    gate, up = (
        F.linear(hidden_state, F.pad(each.weight, (0, 0, 0, missing)), _padded(each.bias, missing))
        for each in layers[:2]
    )
    gated = LigerSiLUMulFunction.apply(gate, up)
    return F.linear(gated, F.pad(mlp.down_proj.weight, (0, missing)), mlp.down_proj.bias)


def _padded(bias: Tensor | None, missing: int) -> Tensor | None:
    return None if bias is None else F.pad(bias, (0, missing))
