"""Images and videos of a conversation: their content, and the tokens that stand for them.

A picture travels as its encoded file, not as the tensors that a model reads. It is small, every process makes the same
tensors of it, and a checkpoint or a rollout file can refer to it by its hash. ``MediaProcessor`` makes the tensors.

    content = MediaContent.of("image", [png_bytes])
    tokens, media = processor.encode("<image>What is this?", [content])
    request = ModelRequest("r1", tokens, sampling, rng_key=1, media=media)
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

MediaKind = Literal["image", "video"]

MEDIA_COLUMN = "media"
"""The object column of a batch that holds the ``Media`` of each row. Their indices count the row's tokens without
padding."""

_IMAGE_TYPES = (
    (b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
)  # fmt: skip
"""How encoded images begin."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MediaContent:
    """An image, or a video as a sequence of images."""

    kind: MediaKind
    frames: tuple[bytes, ...]
    """Encoded images, for example PNG files. An image has one."""
    digest: str
    """Hash of everything else, in hexadecimal. Equal contents have equal digests."""
    frames_per_s: float = 0.0
    """Of a video; 0 for an image."""

    @classmethod
    def of(cls, kind: MediaKind, frames: Sequence[bytes], frames_per_s: float = 0.0) -> MediaContent:
        digest = hashlib.sha256(f"{kind} {frames_per_s!r} {[len(each) for each in frames]}".encode())
        for frame in frames:
            digest.update(frame)
        return cls(kind, tuple(frames), digest.hexdigest(), frames_per_s)

    def images(self) -> list[Image]:
        """The frames as RGB images of Pillow."""
        return list(self.each_image())

    def each_image(self) -> Iterator[Image]:
        """The same, one after the other: all frames of a video in full size may need far more memory than its file."""
        from PIL import Image

        for frame in self.frames:
            yield Image.open(io.BytesIO(frame)).convert("RGB")


class MediaBlock(NamedTuple):
    """Consecutive tokens that stand for a part of an image or video."""

    start: int
    length: int
    grid: tuple[int, int, int] = (0, 0, 0)
    """Time, height and width of the tokens, which decide their rotary positions; zeros for a model that counts tokens
    of media like those of text."""
    time_step: float = 1.0
    """Rotary positions from one time to the next."""


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """An image or video and the tokens of a sequence that stand for it, in the order in which a model encodes it."""

    content: MediaContent
    blocks: tuple[MediaBlock, ...]

    @property
    def num_tokens(self) -> int:
        return sum(block.length for block in self.blocks)

    @property
    def end(self) -> int:
        """The number of tokens of the shortest sequence that holds all of it."""
        return max(block.start + block.length for block in self.blocks)

    def moved(self, offset: int) -> PlacedMedia:
        """The same item in a sequence in which ``offset`` more tokens precede it."""
        return replace(self, blocks=tuple(each._replace(start=each.start + offset) for each in self.blocks))

    def places(self) -> NDArray[np.int64]:
        """The indices of its tokens."""
        import numpy as np

        return np.concatenate([np.arange(each.start, each.start + each.length) for each in self.blocks])


Media = tuple[PlacedMedia, ...]
"""All images and videos of a sequence, in the order of their tokens."""


class MediaProcessor(Protocol):
    """Turns text with placeholders and media into tokens, and media into the tensors that a model reads."""

    @property
    def template(self) -> Any:
        """The tokenizer or processor of transformers whose chat template renders messages with media."""
        ...

    def encode(self, text: str, contents: Sequence[MediaContent]) -> tuple[tuple[int, ...], Media]:
        """Tokens of a rendered chat, in which every placeholder takes the next content of its kind.

        Raises ``ValueError`` if the number of placeholders differs from that of the contents.
        """
        ...

    def inputs(self, content: MediaContent) -> Mapping[str, Any]:
        """The tensors of one item, on the CPU. They are cached by digest."""
        ...


def image_type(data: bytes) -> str:
    """The type of an encoded image, such as ``jpeg`` for ``image/jpeg``; empty if its beginning is not known."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((name for start, name in _IMAGE_TYPES if data.startswith(start)), "")


def identity_tokens(tokens: Sequence[int], media: Media) -> NDArray[np.int32]:
    """The tokens with negative numbers in place of media, which depend on their content.

    Placeholder tokens of two pictures are equal. These numbers are not. Sequences with the same numbers are the same
    input for the model, so they may share keys and values.
    """
    import numpy as np

    identity = np.array(tokens, np.int32)
    for item in media:
        stream = hashlib.shake_256(bytes.fromhex(item.content.digest)).digest(4 * item.num_tokens)
        identity[item.places()] = np.frombuffer(stream, np.int32) | np.int32(-(2**31))
    return identity


def rotary_positions(num_tokens: int, media: Media) -> NDArray[np.int64]:
    """``[3, tokens]``: the time, height and width of every token, for models with multi-dimensional rotary embeddings.

    The three are equal for a token of text. Text after a block continues one position after the block's largest, as in
    the training of these models.
    """
    import numpy as np

    positions = np.empty((3, num_tokens), np.int64)
    blocks = sorted(block for item in media for block in item.blocks if any(block.grid))
    end = start = 0
    for block in blocks:
        num_text = block.start - end
        positions[:, end : block.start] = start + np.arange(num_text)
        start += num_text
        time, height, width = block.grid
        grid = np.stack(np.meshgrid(*(np.arange(size) for size in block.grid), indexing="ij")).reshape(3, -1)
        grid[0] = (np.arange(time) * block.time_step).astype(np.int64).repeat(height * width)
        end = block.start + block.length
        positions[:, block.start : end] = start + grid
        start += _extent(block)
    positions[:, end:] = start + np.arange(num_tokens - end)
    return positions


def rotary_shift(media: Media) -> int:
    """What to add to the index of a token after all media, to get its rotary position."""
    return sum(_extent(block) - block.length for item in media for block in item.blocks if any(block.grid))


def _extent(block: MediaBlock) -> int:
    """The rotary positions of a block, from its first to its largest, which is often that of a video's last time."""
    time, height, width = block.grid
    return max(int((time - 1) * block.time_step) + 1, height, width)
