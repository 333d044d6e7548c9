"""The vision part of ``tiny:`` models: their towers, image processors and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.models.builtin.chat_template import vision_template

VISION_PRESETS = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
"""The architectures with a vision tower."""

_VISION_SIZE = 64
_NUM_VISION_LAYERS = 2
_PATCH_SIZE = 14
_PART_SIZE = 4 * _PATCH_SIZE
"""Side of the parts in which SmolVLM and Idefics3 see a picture. Each has 4 tokens."""

_START, _END, _IMAGE, _VIDEO = _QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDEFICS_TOKENS = (
    "<image>",
    "<video>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)


@dataclass(frozen=True)
class TinyImageProcessor:
    """An image processor of transformers, which does not need torchvision, and the files that describe it."""

    image_processor: Any
    files: Mapping[str, str]


def is_qwen(architecture: str) -> bool:
    return architecture.startswith("qwen")


def extra_tokens(architecture: str) -> tuple[str, ...]:
    """The special tokens after those of every tiny model; none for a text model."""
    if architecture not in VISION_PRESETS:
        return ()
    return _QWEN_TOKENS if is_qwen(architecture) else _IDEFICS_TOKENS


def template(architecture: str) -> str:
    """The chat template, with what the processor replaces by the tokens of a picture."""
    if is_qwen(architecture):
        return vision_template(_START + _IMAGE + _END, _START + _VIDEO + _END)
    return vision_template("<image>", "<video>" if architecture == "smolvlm" else "")


def build_config(architecture: str, text: Mapping[str, Any], first_token_id: int) -> Any:
    """The config of the whole model. ``text`` are the settings of its text part."""
    from transformers import AutoConfig

    made = dict(text)
    ids = {token: first_token_id + number for number, token in enumerate(extra_tokens(architecture))}
    options: dict[str, Any]
    if is_qwen(architecture):
        # Qwen2.5-VL computes the size of a head from the others.
        head_dim = made.pop("head_dim") if architecture == "qwen2_5_vl" else made["head_dim"]
        made["rope_parameters"] = _rope(head_dim, is_interleaved=architecture == "qwen3_vl")
        options = {
            "image_token_id": ids[_IMAGE],
            "video_token_id": ids[_VIDEO],
            "vision_start_token_id": ids[_START],
            "vision_end_token_id": ids[_END],
        }
    else:
        made["model_type"] = "llama"
        options = {"image_token_id": ids["<image>"], "pad_token_id": made["pad_token_id"], "scale_factor": 2}
    return AutoConfig.for_model(
        architecture,
        text_config=made,
        vision_config=_tower(architecture, made["hidden_size"]),
        tie_word_embeddings=made["tie_word_embeddings"],
        **options,
    )


def _rope(head_dim: int, *, is_interleaved: bool) -> dict[str, Any]:
    """Rotary frequencies, divided among time, height and width in the proportions of the real models."""
    section = [2 * head_dim // 16, 3 * head_dim // 16, 3 * head_dim // 16]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    return {**rope, "mrope_interleaved": True} if is_interleaved else rope


def _tower(architecture: str, hidden_size: int) -> dict[str, Any]:
    common = {
        "hidden_size": _VISION_SIZE,
        "intermediate_size": 2 * _VISION_SIZE,
        "patch_size": _PATCH_SIZE,
        "initializer_range": _VISION_SIZE**-0.5,
    }
    if not is_qwen(architecture):
        layers = {"num_hidden_layers": _NUM_VISION_LAYERS, "num_attention_heads": 4}
        return {**common, **layers, "image_size": _PART_SIZE}
    layers = {"depth": _NUM_VISION_LAYERS, "num_heads": 4, "out_hidden_size": hidden_size}
    if architecture == "qwen3_vl":
        return {**common, **layers, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return {**common, **layers, "fullatt_block_indexes": [1]}


def build_image_processor(architecture: str) -> TinyImageProcessor:
    """For Qwen, a picture of 56×56 pixels has 4 tokens and none has more than 16. For the others, one has 12 or 20."""
    from headwater.models.vision.families import image_processor_class
    from headwater.models.vision.files import files_of

    processor_class = image_processor_class(architecture)
    if is_qwen(architecture):
        size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
        options = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": _PATCH_SIZE}
        made = processor_class(size=size, **options)
        kind, videos = ("Qwen3VL", "Qwen3VL") if architecture == "qwen3_vl" else ("Qwen2_5_VL", "Qwen2VL")
        # Qwen3-VL limits the pixels of all frames together.
        num_frames = 16 if architecture == "qwen3_vl" else 1
        limits = {"shortest_edge": 28 * 28, "longest_edge": num_frames * 56 * 56}
        video = {"video_processor_type": f"{videos}VideoProcessor", "size": limits, **options}
        return TinyImageProcessor(made, files_of(made, f"{kind}Processor", video))
    has_videos = architecture == "smolvlm"
    part = {"longest_edge": _PART_SIZE}
    made = processor_class(size={"longest_edge": 2 * _PART_SIZE}, max_image_size=part)
    video = {"video_processor_type": "SmolVLMVideoProcessor", "size": part, "max_image_size": part}
    kind = "SmolVLM" if has_videos else "Idefics3"
    return TinyImageProcessor(made, files_of(made, f"{kind}Processor", video if has_videos else {}, image_seq_len=4))
