"""The vision part of ``tiny:`` models: their towers, image processors and special tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwater.models.builtin.chat_template import vision_template

QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

_VISION_SIZE = 64


def extra_tokens(architecture: str) -> tuple[str, ...]:
    """The special tokens after those of every tiny model; none for a text model."""
    return QWEN_TOKENS if architecture in BUILDERS else ()


def template(architecture: str) -> str:
    start, end, image, video = QWEN_TOKENS
    return vision_template(start + image + end, start + video + end)


def build_config(architecture: str, text: Mapping[str, Any], first_token_id: int) -> Any:
    """The config of the whole model. ``text`` are the settings of its text part."""
    return BUILDERS[architecture](dict(text), first_token_id)


def _qwen2_5_vl(text: dict[str, Any], first_token_id: int) -> Any:
    from transformers import Qwen2_5_VLConfig

    head_dim = text.pop("head_dim")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _rope_section(head_dim)}
    vision = {
        "depth": 2,
        "hidden_size": _VISION_SIZE,
        "intermediate_size": 2 * _VISION_SIZE,
        "num_heads": 4,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1],
        "initializer_range": _VISION_SIZE**-0.5,
    }
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=True,
        **_qwen_ids(first_token_id),
    )


def _rope_section(head_dim: int) -> list[int]:
    """How many of the rotary frequencies belong to time, height and width, in the proportions of the real models."""
    return [2 * head_dim // 16, 3 * head_dim // 16, 3 * head_dim // 16]


def _qwen_ids(first_token_id: int) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {name: first_token_id + offset for offset, name in enumerate(names)}


def build_image_processor(architecture: str) -> Any:
    """Without torchvision. A picture of 56×56 pixels has 4 tokens, and none has more than 16."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})


BUILDERS: Mapping[str, Callable[[dict[str, Any], int], Any]] = {"qwen2_5_vl": _qwen2_5_vl}
