"""Which models read images, which of them are supported, and which parameters see pixels."""

from __future__ import annotations

from typing import Any

from headwater.core.errors import ModelError

SUPPORTED_VISION = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
"""The model types in config.json that can be given images and videos."""

_WITH_GRID_POSITIONS = ("qwen2_5_vl", "qwen3_vl")

GATED_ALIGNMENT = 64
"""Gated layers of a tower are computed with copies of their weights, filled up to a multiple of this width. Those of
Qwen2.5-VL have a width of 3420, for which cuBLAS has no fast kernels: it needs rows of eight bfloat16 numbers."""

_VISION_MODULES = ("visual", "vision_model", "connector")
"""Children of the base model that turn pixels into embeddings, in all supported models."""


def is_vision(config: Any) -> bool:
    """Whether the config is that of a whole model with a vision tower. The config of its text part is not."""
    return getattr(config, "vision_config", None) is not None


def uses_grid_positions(config: Any) -> bool:
    """Whether rotary positions have three parts (M-RoPE). ``config`` is the whole model's or its text part's."""
    return config.model_type.removesuffix("_text") in _WITH_GRID_POSITIONS


def check_supported(config: Any, name: str) -> None:
    """Refuse a model with a vision tower that is not in ``SUPPORTED_VISION``. ``name`` is for the message."""
    if is_vision(config) and config.model_type not in SUPPORTED_VISION:
        raise ModelError(
            f"{name}: vision models of type {config.model_type} are not supported; "
            f"use a text model, or one of type {', '.join(SUPPORTED_VISION)}"
        )


def patches_per_token(config: Any) -> int:
    """How many patches of a picture the projector merges into one token of the decoder."""
    vision = config.vision_config
    side = vision.spatial_merge_size if hasattr(vision, "spatial_merge_size") else config.scale_factor
    return int(side) ** 2


def is_projector(name: str) -> bool:
    """Whether a parameter of ``vision_parameter_names`` is applied to merged patches."""
    return "merger" in name or ".connector." in name


def vision_parameter_names(model: Any) -> set[str]:
    """The names of the parameters of the vision tower and of what projects its output. Empty for a text model."""
    if not is_vision(model.config):
        return set()
    prefix = model.base_model_prefix
    starts = tuple(f"{prefix}.{module}." for module in _VISION_MODULES)
    return {name for name, _ in model.named_parameters() if name.startswith(starts)}
