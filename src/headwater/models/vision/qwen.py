"""Qwen2.5-VL and Qwen3-VL: the pixels of their towers, the tokens of a picture or video, and their rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from headwater.core.media import MediaContent, MediaKind
from headwater.models.upload import upload
from headwater.models.vision.family import BlockShape, MediaFeatures
from headwater.models.vision.frames import PatchMaker, fitted_size, frame_rate, size_of

_TOKENS: dict[MediaKind, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_TENSORS: dict[MediaKind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
_LEVELS = "pixel_levels"
_START, _END = "<|vision_start|>", "<|vision_end|>"


def patches_of(inputs: Mapping[str, Tensor]) -> tuple[Tensor, tuple[int, int, int]]:
    """The patches of one picture or video, and its groups of frames and rows and columns of patches.

    They are bytes if ``QwenFamily.level_inputs`` has made the inputs.
    """
    pixels, grid = _TENSORS[kind_of(inputs)]
    num_frames, height, width = inputs[grid][0].tolist()
    return inputs[_LEVELS if _LEVELS in inputs else pixels], (num_frames, height, width)


def kind_of(inputs: Mapping[str, Tensor]) -> MediaKind:
    return "image" if _TENSORS["image"][1] in inputs else "video"


class QwenFamily:
    """A picture is cut into patches. The tower merges squares of them into one token each.

    The tower reads two frames of a video at once. Qwen2.5-VL tells by rotary positions when they were, Qwen3-VL by
    text before them.
    """

    uses_token_types = True

    def __init__(self, image_processor: Any, config: Any, video_settings: Mapping[str, Any]) -> None:
        self.image_processor = image_processor
        vision = config.vision_config
        self._merge_size = int(vision.spatial_merge_size)
        self._has_timestamps = config.model_type == "qwen3_vl"
        self._tokens_per_s = 0 if self._has_timestamps else int(vision.tokens_per_second)
        self._group = int(image_processor.temporal_patch_size)
        self._factor = int(image_processor.patch_size) * self._merge_size
        # What the video processors of transformers use for a model without settings.
        default = {"shortest_edge": 128 * self._factor**2, "longest_edge": 768 * self._factor**2}
        size = {**default, **(video_settings.get("size") or {})}
        self._min_video_pixels = int(video_settings.get("min_pixels") or size["shortest_edge"])
        self._max_video_pixels = int(video_settings.get("max_pixels") or size["longest_edge"])
        of_videos = {key: video_settings[key] for key in ("image_mean", "image_std") if key in video_settings}
        self.patches: dict[MediaKind, PatchMaker] = {
            "image": PatchMaker(image_processor),
            "video": PatchMaker(image_processor, **of_videos),
        }

    def placeholder(self, kind: MediaKind) -> str:
        return _TOKENS[kind]

    def prepared(self, text: str) -> str:
        # Qwen3-VL has a start and an end around every frame instead of those that the chat template writes.
        return text.replace(_START + _TOKENS["video"] + _END, _TOKENS["video"]) if self._has_timestamps else text

    def token(self, kind: MediaKind) -> str:
        return _TOKENS[kind]

    def pieces(self, content: MediaContent) -> Sequence[str | BlockShape]:
        height, width = (side // self._factor for side in self._size(content))
        if content.kind == "image":
            return [BlockShape(height * width, (1, height, width))]
        group = self._group
        num_groups = -(-len(content.frames) // group)
        if not self._has_timestamps:
            grid = (num_groups, height, width)
            return [BlockShape(num_groups * height * width, grid, self._tokens_per_s * group / frame_rate(content))]
        pieces: list[str | BlockShape] = []
        for number in range(num_groups):
            first, last = group * number, min(group * (number + 1), len(content.frames)) - 1
            middle_s = (first + last) / 2 / frame_rate(content)
            pieces += [f"<{middle_s:.1f} seconds>{_START}", BlockShape(height * width, (1, height, width)), _END]
        return pieces

    def inputs(self, content: MediaContent) -> dict[str, Tensor]:
        pixels, grid = self.patches[content.kind](content.each_image(), self._size(content))
        made = dict(zip(_TENSORS[content.kind], (pixels, torch.tensor([grid])), strict=True))
        if content.kind == "video" and not self._has_timestamps:
            made["second_per_grid_ts"] = torch.tensor([self._group / frame_rate(content)])
        return made

    def level_inputs(self, content: MediaContent) -> dict[str, Tensor]:
        """``inputs`` for the tower alone, with the bytes of the pixels: an eighth of the memory, made in less time.
        ``patches[kind].values`` makes what the tower reads of them, on its device."""
        levels, grid = self.patches[content.kind].levels(content.each_image(), self._size(content))
        return {_LEVELS: levels, _TENSORS[content.kind][1]: torch.tensor([grid])}

    def _size(self, content: MediaContent) -> tuple[int, int]:
        """Height and width to which a picture or the frames of a video are scaled."""
        if content.kind == "image":
            limits = self.image_processor.size
            low, high = limits["shortest_edge"], limits["longest_edge"]
            return fitted_size(size_of(content), factor=self._factor, min_pixels=low, max_pixels=high)
        # Qwen3-VL limits the pixels of a video, Qwen2.5-VL those of each frame.
        frames = {"num_frames": len(content.frames), "group": self._group}
        return fitted_size(
            size_of(content),
            factor=self._factor,
            min_pixels=self._min_video_pixels,
            max_pixels=self._max_video_pixels,
            **(frames if self._has_timestamps else {}),
        )

    def joined(self, inputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        names = dict.fromkeys(name for each in inputs for name in each)
        return {name: torch.cat([each[name] for each in inputs if name in each]) for name in names}

    def features(self, model: Any, inputs: Sequence[Mapping[str, Tensor]]) -> list[MediaFeatures]:
        visual = getattr(model, model.base_model_prefix).visual
        # Images and videos go through the same tower.
        names = [_TENSORS["image" if "pixel_values" in each else "video"] for each in inputs]
        grids = torch.cat([each[name] for each, (_, name) in zip(inputs, names, strict=True)])
        tables, largest = tower_tables(visual, grids)
        patches = [each[name] for each, (name, _) in zip(inputs, names, strict=True)]
        uploaded = upload([*patches, *tables.values()], model.get_input_embeddings().weight.device)
        pixels = torch.cat(uploaded[: len(patches)])
        options = dict(zip(tables, uploaded[len(patches) :], strict=True))
        output = visual(pixels, grid_thw=grids, return_dict=True, **options, **largest)
        sizes = (grids.prod(-1) // self._merge_size**2).tolist()
        layers = output.deepstack_features if self._has_timestamps else []
        embeddings, *deep = (torch.split(each, sizes) for each in (output.pooler_output, *layers))
        return [MediaFeatures(each, tuple(layer[index] for layer in deep)) for index, each in enumerate(embeddings)]


def tower_tables(visual: Any, grids: Tensor) -> tuple[dict[str, Tensor], dict[str, int]]:
    """What a tower derives from the grids of pictures: positions, windows, and where they begin. These are tensors, and
    the sizes of the largest frame and window, by the names under which the tower's forward pass takes them.

    The layers of transformers derive it in every pass from grids on the device, and wait for the device each time. Made
    on the host and given to the tower, it costs one copy that nothing waits for.

    ``grids`` is on the CPU, and so are the tensors.
    """
    merge = visual.spatial_merge_size
    tensors = {
        "position_ids": get_vision_position_ids(grids, merge),
        "cu_seqlens": get_vision_cu_seqlens(grids),
    }
    largest = {"max_seqlen": _largest(tensors["cu_seqlens"])}
    if hasattr(visual, "fullatt_block_indexes"):
        sizes = {"spatial_merge_size": merge, "window_size": visual.window_size, "patch_size": visual.patch_size}
        tensors["window_index"], tensors["cu_window_seqlens"] = get_vision_window_index(grids, **sizes)
        largest["max_window_seqlen"] = _largest(tensors["cu_window_seqlens"])
    if hasattr(visual, "pos_embed"):
        tensors["interp_indices"], tensors["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    return tensors, largest


def _largest(starts: Tensor) -> int:
    return int(starts.diff().max())
