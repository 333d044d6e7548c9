"""Models that read images and videos: their processor, and the part that turns pixels into embeddings.

    processor = load_processor("tiny:qwen2_5_vl")
    tokens, media = processor.encode(text, contents)
    features = VisionTower(model, processor)([item.content for item in media])

``features[i].embeddings`` replaces the embeddings of the tokens ``media[i].places()``.
"""

from headwater.models.vision.architecture import (
    SUPPORTED_VISION,
    is_vision,
    uses_grid_positions,
    vision_parameter_names,
)
from headwater.models.vision.family import MediaFeatures
from headwater.models.vision.processor import VisionProcessor
from headwater.models.vision.tower import VisionTower

__all__ = [
    "SUPPORTED_VISION",
    "MediaFeatures",
    "VisionProcessor",
    "VisionTower",
    "is_vision",
    "uses_grid_positions",
    "vision_parameter_names",
]
