"""The family of a vision model, and its image processor, by the type in its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from headwater.core.errors import ModelError
from headwater.models.vision.family import VisionFamily
from headwater.models.vision.idefics import IdeficsFamily
from headwater.models.vision.qwen import QwenFamily

_FAMILIES: dict[str, Callable[[Any, Any, Mapping[str, Any]], VisionFamily]] = {
    "qwen2_5_vl": QwenFamily,
    "qwen3_vl": QwenFamily,
    "smolvlm": IdeficsFamily,
    "idefics3": IdeficsFamily,
}
_IMAGE_PROCESSORS = {
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLImageProcessor"),
    "qwen3_vl": ("qwen2_vl", "Qwen2VLImageProcessor"),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessor"),
    "idefics3": ("idefics3", "Idefics3ImageProcessor"),
}
"""The folder in transformers and the name without the suffix of a variant."""


def vision_family(config: Any, image_processor: Any, video_settings: Mapping[str, Any]) -> VisionFamily:
    """``video_settings`` is the content of video_preprocessor_config.json, as far as there is one."""
    return _FAMILIES[config.model_type](image_processor, config, video_settings)


def image_processor_class(model_type: str) -> Any:
    """The image processor of transformers that uses Pillow, so that pictures do not depend on whether torchvision is
    installed. Without torchvision, some versions of transformers offer it only by its full path."""
    folder, name = _IMAGE_PROCESSORS[model_type]
    if find_spec("PIL") is None:
        raise ModelError(f"models of type {model_type} read images with Pillow; pip install headwater[vision]")
    try:
        return getattr(import_module(f"transformers.models.{folder}.image_processing_pil_{folder}"), f"{name}Pil")
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"transformers {version('transformers')} cannot load the image processor of models of type {model_type} "
            f"({error}); install a version that Headwater was tested with: pip install 'transformers>=5.16,<5.20'"
        ) from error


def image_processor_name(model_type: str) -> str:
    """The name that files use, without the suffix of a variant."""
    return _IMAGE_PROCESSORS[model_type][1]
