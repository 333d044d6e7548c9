"""The family of a vision model by the type in its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwater.models.vision.family import VisionFamily
from headwater.models.vision.idefics import IdeficsFamily
from headwater.models.vision.qwen import QwenFamily

_FAMILIES: dict[str, Callable[[Any, Any, Mapping[str, Any]], VisionFamily]] = {
    "qwen2_5_vl": QwenFamily,
    "qwen3_vl": QwenFamily,
    "smolvlm": IdeficsFamily,
    "idefics3": IdeficsFamily,
}


def vision_family(config: Any, image_processor: Any, video_settings: Mapping[str, Any]) -> VisionFamily:
    """``video_settings`` is the content of video_preprocessor_config.json, as far as there is one."""
    return _FAMILIES[config.model_type](image_processor, config, video_settings)
