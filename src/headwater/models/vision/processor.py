"""Text with pictures to tokens, and pictures to the tensors that a model reads.

Only the tokenizer and the image processor of transformers are used. Its processors of whole models cannot be built
without torchvision, because they also contain a video processor that needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.chat.render import encode_rendered
from headwater.core.byte_cache import ByteCache
from headwater.core.media import Media, MediaBlock, MediaContent, MediaKind, PlacedMedia, rotary_positions
from headwater.models.vision.family import BlockShape, VisionFamily

DEFAULT_CACHE_BYTES = 2**30
"""About 100 pictures of 512 tokens of Qwen2.5-VL. The learner reads ahead, so those of two of its passes must fit."""
_KINDS: tuple[MediaKind, ...] = ("image", "video")


class VisionProcessor:
    """The ``MediaProcessor`` of a model. It can be pickled; the copy begins with an empty cache."""

    def __init__(
        self,
        tokenizer: Any,
        family: VisionFamily,
        files: Mapping[str, str] | None = None,
        *,
        max_cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        """``files`` are those of a model folder that describe the processor, besides those of the tokenizer."""
        self.tokenizer = tokenizer
        self.family = family
        self.files = dict(files or {})
        self._cache: ByteCache[str, dict[str, Tensor]] = ByteCache(max_cache_bytes, _num_bytes)

    @property
    def template(self) -> Any:
        return self.tokenizer

    def encode(self, text: str, contents: Sequence[MediaContent]) -> tuple[tuple[int, ...], Media]:
        """Tokens of a rendered chat, in which every placeholder takes the next content of its kind.

        Raises ``ValueError`` if the number of placeholders differs from that of the contents.
        """
        expanded, ordered = self._expand(self.family.prepared(text), contents)
        tokens = encode_rendered(self.tokenizer, expanded)
        marks = {self.tokenizer.convert_tokens_to_ids(self.family.token(kind)) for kind in _KINDS}
        places = [place for place, token in enumerate(tokens) if token in marks]
        shapes = [shape for _, blocks in ordered for shape in blocks]
        if len(places) != len(shapes):
            raise ValueError(
                f"the tokenizer makes {len(places)} tokens of {len(shapes)} placeholders; use the model's own tokenizer"
            )
        # Each block is one token so far: the tokenizer need not read thousands of equal ones.
        long: list[int] = []
        starts = []
        end = 0
        for place, shape in zip(places, shapes, strict=True):
            long.extend(tokens[end:place])
            starts.append(len(long))
            long.extend([tokens[place]] * shape.length)
            end = place + 1
        long.extend(tokens[end:])
        left = iter(starts)
        media = []
        for content, blocks in ordered:
            placed = tuple(MediaBlock(next(left), *shape) for shape in blocks)
            media.append(PlacedMedia(content, placed))
        return tuple(long), tuple(media)

    def inputs(self, content: MediaContent) -> Mapping[str, Tensor]:
        """The tensors of one item, on the CPU, with the names that the model's forward pass gives them."""
        return self._cache.get_or_load(content.digest, lambda: self._made(content))

    def kept(self, content: MediaContent) -> Mapping[str, Tensor] | None:
        """``inputs`` if they are still in memory."""
        return self._cache.get(content.digest)

    def _made(self, content: MediaContent) -> dict[str, Tensor]:
        return self.family.inputs(content)

    def model_inputs(self, tokens: Sequence[int], media: Media) -> dict[str, Tensor]:
        """What the forward pass and ``generate`` of the whole transformers model take for one sequence.

        Rotary positions are given, because transformers 5 continues text after a video of Qwen2.5-VL among the times of
        the video.
        """
        types = torch.zeros(1, len(tokens), dtype=torch.int32)
        for item in media:
            types[0, torch.from_numpy(item.places())] = 1 + _KINDS.index(item.content.kind)
        made = self.family.joined([self.inputs(item.content) for item in media])
        if self.family.uses_token_types:
            made["mm_token_type_ids"] = types
            made["position_ids"] = torch.from_numpy(rotary_positions(len(tokens), media))[:, None]
        return {"input_ids": torch.tensor([list(tokens)]), **made}

    def save(self, folder: Path) -> None:
        """Write the files beside the model's, so that transformers' ``AutoProcessor`` finds them."""
        for name, content in self.files.items():
            (folder / name).write_text(content, encoding="utf-8")

    def _expand(
        self, text: str, contents: Sequence[MediaContent]
    ) -> tuple[str, list[tuple[MediaContent, list[BlockShape]]]]:
        """The text with one token per block, and the contents with their blocks in the order of the text."""
        marks = {kind: mark for kind in _KINDS if (mark := self.family.placeholder(kind))}
        self._check_numbers(text, contents, marks)
        kind_of = {mark: kind for kind, mark in marks.items()}
        left = {kind: iter([each for each in contents if each.kind == kind]) for kind in marks}
        parts: list[str] = []
        ordered = []
        for part in re.split(f"({'|'.join(map(re.escape, kind_of))})", text):
            if part not in kind_of:
                parts.append(part)
                continue
            kind = kind_of[part]
            content = next(left[kind])
            blocks = []
            for piece in self.family.pieces(content):
                if isinstance(piece, str):
                    parts.append(piece)
                else:
                    parts.append(self.family.token(kind))
                    blocks.append(piece)
            ordered.append((content, blocks))
        return "".join(parts), ordered

    def _check_numbers(self, text: str, contents: Sequence[MediaContent], marks: Mapping[MediaKind, str]) -> None:
        for kind in _KINDS:
            num_contents = sum(content.kind == kind for content in contents)
            if kind not in marks:
                if num_contents:
                    raise ValueError(f"this model takes no {kind}s")
                continue
            num_places = text.count(marks[kind])
            if num_places != num_contents:
                raise ValueError(
                    f"the text has {num_places} placeholders {marks[kind]} for {num_contents} {kind}s; "
                    f"it must have one for each {kind}"
                )


def _num_bytes(inputs: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())
