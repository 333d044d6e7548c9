"""The family of a vision model by the type in its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.models.vision.family import VisionFamily
from headwater.models.vision.qwen import QwenFamily

_FAMILIES: dict[str, Callable[[Any, Any], VisionFamily]] = {"qwen2_5_vl": QwenFamily}


def vision_family(config: Any, image_processor: Any) -> VisionFamily:
    return _FAMILIES[config.model_type](image_processor, config)
