"""SmolVLM and Idefics3: a picture is shown in parts of equal size, and then as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from headwater.core.media import MediaContent, MediaKind
from headwater.models.upload import upload
from headwater.models.vision.family import BlockShape, MediaFeatures
from headwater.models.vision.frames import frame_rate, size_of

_TOKEN, _AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_VIDEO = "<video>"
_MAX_SIDE = 4096
"""The longest side of a picture that is cut up."""
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class IdeficsFamily:
    """Every part of a picture has equally many tokens, in a separate block. Frames of a video are not cut up."""

    uses_token_types = False

    def __init__(self, image_processor: Any, config: Any, video_settings: Mapping[str, Any]) -> None:
        self.image_processor = image_processor
        vision = config.vision_config
        self._part_tokens = (int(vision.image_size) // int(vision.patch_size)) ** 2 // int(config.scale_factor) ** 2
        self._takes_videos = config.model_type == "smolvlm"
        sampling = video_settings.get("video_sampling") or {}
        self._frame_size = dict(sampling.get("video_size") or video_settings.get("size") or image_processor.size)

    def placeholder(self, kind: MediaKind) -> str:
        if kind == "video":
            return _VIDEO if self._takes_videos else ""
        return _TOKEN

    def prepared(self, text: str) -> str:
        return text

    def token(self, kind: MediaKind) -> str:
        return _TOKEN

    def pieces(self, content: MediaContent) -> Sequence[str | BlockShape]:
        if content.kind == "video":
            return self._frames(content)
        num_rows, num_columns = self._parts(size_of(content))
        if num_rows * num_columns == 1:
            return self._whole()
        pieces: list[str | BlockShape] = []
        for row in range(1, num_rows + 1):
            for column in range(1, num_columns + 1):
                pieces += [f"{_AROUND}<row_{row}_col_{column}>", BlockShape(self._part_tokens)]
            pieces.append("\n")
        return [*pieces, "\n", *self._whole()]

    def _parts(self, size: tuple[int, int]) -> tuple[int, int]:
        """Into how many rows and columns a picture of this height and width is cut."""
        made = self.image_processor
        if not made.do_image_splitting:
            return 1, 1
        if made.do_resize:
            size = _with_longest_side(size, made.size["longest_edge"])
            size = _with_longest_side(size, min(max(size), _MAX_SIDE), is_even=False)
        part = int(made.max_image_size["longest_edge"])
        longest = math.ceil(max(size) / part) * part
        height, width = _with_longest_side(size, longest, is_even=False)
        return math.ceil(height / part), math.ceil(width / part)

    def _whole(self) -> list[str | BlockShape]:
        return [_AROUND + _WHOLE, BlockShape(self._part_tokens), _AROUND]

    def _frames(self, content: MediaContent) -> list[str | BlockShape]:
        num_frames, rate = len(content.frames), frame_rate(content)
        length = timedelta(seconds=int(num_frames / rate))
        pieces: list[str | BlockShape] = [
            f"You are provided the following series of {in_words(num_frames)} frames from a {length} [H:MM:SS] video.\n"
        ]
        for number in range(num_frames):
            minutes, seconds = divmod(int(number / rate), 60)
            pieces += [f"\nFrame from {minutes:02d}:{seconds:02d}:", *self._whole()]
        return [*pieces, "\n\n"]

    def inputs(self, content: MediaContent) -> dict[str, Tensor]:
        options = {} if content.kind == "image" else {"do_image_splitting": False, "size": self._frame_size}
        # Frame by frame, so that they are not all in memory in full size.
        made = [self.image_processor([[image]], return_tensors="pt", **options) for image in content.each_image()]
        # Without their masks: all parts have the same size, so there is no padding.
        return {"pixel_values": torch.cat([each["pixel_values"] for each in made], dim=1)}

    def joined(self, inputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {"pixel_values": torch.cat([each["pixel_values"] for each in inputs], dim=1)} if inputs else {}

    def features(self, model: Any, inputs: Sequence[Mapping[str, Tensor]]) -> list[MediaFeatures]:
        joined = self.joined(inputs)
        uploaded = upload([*joined.values()], model.get_input_embeddings().weight.device)
        output = model.get_image_features(**dict(zip(joined, uploaded, strict=True)), return_dict=True)
        parts = output.pooler_output.split([each["pixel_values"].shape[1] for each in inputs])
        return [MediaFeatures(each.flatten(0, 1)) for each in parts]


def _with_longest_side(size: tuple[int, int], longest: int, *, is_even: bool = True) -> tuple[int, int]:
    """Height and width in the same proportion, rounded like the image processor does it."""
    height, width = size
    ratio = width / height
    shorter = int(longest / ratio) if width >= height else int(longest * ratio)
    shorter = max(shorter + shorter % 2 if is_even else shorter, 1)
    return (shorter, longest) if width >= height else (longest, shorter)


def in_words(number: int) -> str:
    """A number below one thousand in words, as SmolVLM was trained to read it: ``twenty-one``."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_ONES[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
