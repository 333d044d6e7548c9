"""Images and videos of requests: they are checked and read by threads, before their requests enter the queue.

A picture that cannot be read, or whose tokens are not those that the model makes of it, fails only its own request.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from weakref import ref

import torch
from torch import Tensor

from headwater.core.errors import RequestError, RolloutFailed
from headwater.core.media import Media, MediaContent, PlacedMedia, rotary_shift
from headwater.core.requests import ModelRequest
from headwater.models.vision import VisionProcessor
from headwater.models.vision.family import BlockShape
from headwater.models.vision.frames import num_pixels

_MAX_THREADS = 16
_NUM_KNOWN = 1024
"""How many items that were read are remembered, so that the samples of a group read their pictures once."""
MAX_PIXELS = 2**30
"""Of all frames of an item together, before they are scaled: about 500 frames of full HD. They are read one by one, so
this limits time, not memory."""
_INPUT_BYTES = 2**30
"""Main memory for pictures, as tensors, that wait for the vision tower. Beyond it they are read again."""
_MAX_TIME = 2**24
"""Limit of rotary positions in time: float32 counts no further."""
_DIGEST_CHARACTERS = 64
_NUM_SHOWN = 3

Inputs = Mapping[str, Tensor]
_T = TypeVar("_T")


class MediaFailed(Exception):
    """Some images or videos of a batch cannot be computed. Nothing else has happened for the batch."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        """``reasons`` are by digest. They are texts: the traceback of an error would keep tensors in memory."""
        super().__init__(*reasons.values())
        self.reasons = reasons

    def error_of(self, request: ModelRequest) -> RequestError | None:
        """Why this request cannot be served, if it has one of these items."""
        for item in request.media:
            if item.content.digest in self.reasons:
                what = f"{_name(item.content)} {self.reasons[item.content.digest]}"
                return RequestError(f"request {request.request_id}: {what}")
        return None


@dataclass(frozen=True)
class Reading:
    """The media of a request that are being read."""

    request: ModelRequest
    checks: Sequence[Future[Future[None]]]
    """Per item, its check. The result is the reading of the picture, which requests with the same picture share."""

    @property
    def is_done(self) -> bool:
        return all(map(_is_done, self.checks))

    def error(self) -> RolloutFailed | None:
        """Why the request cannot be served. Waits until its media have been read."""
        for check in self.checks:
            try:
                check.result().result()
            except (CancelledError, RolloutFailed):
                return RolloutFailed(f"request {self.request.request_id}: the engine is closed")
            except Exception as failure:  # noqa: BLE001  whatever it is, it is about this picture
                return RequestError(f"request {self.request.request_id}: {failure}")
        return None


def _is_done(check: Future[Future[None]]) -> bool:
    return check.done() and (check.cancelled() or check.exception() is not None or check.result().done())


def _are(last: Sequence[tuple[ref[MediaContent], object]], media: Media) -> bool:
    """Whether these are the same objects, so that nothing needs to be checked again."""
    if len(last) != len(media):
        return False
    pairs = zip(last, media, strict=True)
    return all(content() is item.content and blocks is item.blocks for (content, blocks), item in pairs)


def _has_failed(check: Future[Future[None]]) -> bool:
    if not _is_done(check):
        return False
    if check.cancelled() or check.exception() is not None:
        return True
    reading = check.result()
    return reading.cancelled() or reading.exception() is not None


class _TowerInputs(VisionProcessor):
    """Makes tensors that a vision tower can take as they are."""

    def __init__(self, processor: VisionProcessor, dtype: torch.dtype | None, *, as_levels: bool) -> None:
        # A separate cache: pictures of many requests wait at the same time.
        super().__init__(processor.tokenizer, processor.family, processor.files, max_cache_bytes=_INPUT_BYTES)
        self._dtype = dtype
        self._as_levels = as_levels

    def _made(self, content: MediaContent) -> dict[str, Tensor]:
        family: Any = self.family
        if self._as_levels:
            levels: dict[str, Tensor] = family.level_inputs(content)
            return levels
        made = super()._made(content)
        if "pixel_values" in made:
            made["pixel_values"] = made["pixel_values"].to(self._dtype or made["pixel_values"].dtype)
        return made


class MediaReader:
    """Reads the media of requests. Its methods may be called from any thread."""

    def __init__(
        self,
        processor: VisionProcessor,
        *,
        uses_grid: bool,
        max_positions: int,
        dtype: torch.dtype | None = None,
        as_levels: bool = False,
    ) -> None:
        """``max_positions`` is the number of rotary positions of the model.

        ``dtype`` is that of the tower that takes the tensors, by default float32. ``as_levels``: the tower takes
        ``QwenFamily.level_inputs``.
        """
        self.processor: VisionProcessor = _TowerInputs(processor, dtype, as_levels=as_levels)
        self._uses_grid = uses_grid
        self._max_positions = max_positions
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(num_threads, "headwater-media")
        self._urgent = ThreadPoolExecutor(num_threads, "headwater-media-again")
        """For pictures that were read and dropped before their turn: they do not wait behind new ones."""
        self._known: OrderedDict[str, Future[None]] = OrderedDict()
        """By digest, only of contents whose digest is right."""
        self._last: tuple[list[tuple[ref[MediaContent], object]], Sequence[Future[Future[None]]]] = [], ()
        """Contents and blocks of a request, and their checks. The samples of a prompt share all of them."""
        self._lock = threading.Lock()

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for media that are wrong whatever the pictures show."""
        end = 0
        for item in request.media:
            problem = _wrong_content(item.content) or self._wrong_blocks(item, end)
            if problem:
                raise RequestError(f"request {request.request_id}: {_name(item.content)} {problem}")
            end = item.end
        # Times of a video may be further apart than the tokens between them.
        shift = rotary_shift(request.media)
        num_positions = len(request.input_tokens) + request.sampling.max_new_tokens + shift
        if shift > 0 and num_positions > self._max_positions:
            raise RequestError(
                f"request {request.request_id}: with the times of its videos it needs {num_positions} rotary "
                f"positions, and the model has {self._max_positions}; use shorter videos, or lower max_new_tokens"
            )

    def begin(self, request: ModelRequest, on_done: Callable[[], None]) -> Reading:
        """Start to read the media of a request. ``on_done`` is called by other threads when an item may be done."""

        def is_done(_: Future[Any]) -> None:
            on_done()

        last, known = self._last
        if _are(last, request.media) and not any(map(_has_failed, known)):
            # Whoever began them is told when they are done, and looks at all requests.
            return Reading(request, known)
        checks = [self._submit(self._checked, item, is_done) for item in request.media]
        for check in checks:
            check.add_done_callback(is_done)
        self._last = [(ref(item.content), item.blocks) for item in request.media], checks
        return Reading(request, checks)

    def read(self, request: ModelRequest) -> None:
        """Read the media of a request and wait for it. Raises ``RequestError`` if they cannot be served."""
        error = self.begin(request, lambda: None).error()
        if error is not None:
            raise error

    def read_all(self, contents: Sequence[MediaContent]) -> dict[str, Inputs]:
        """The tensors of all contents by digest, made in parallel unless they are still in memory.

        Raises ``MediaFailed``.
        """
        # The engine's thread calls this. It must not wait for a turn beside the threads that read new pictures.
        kept = {each.digest: self.processor.kept(each) for each in contents}
        futures = {
            each.digest: self._urgent.submit(self.processor.inputs, each)
            for each in contents
            if kept[each.digest] is None
        }
        failures = {digest: error for digest, each in futures.items() if (error := each.exception()) is not None}
        if failures:
            raise MediaFailed({digest: _unreadable(error) for digest, error in failures.items()})
        return {digest: inputs or futures[digest].result() for digest, inputs in kept.items()}

    def close(self) -> None:
        for threads in (self._threads, self._urgent):
            threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, action: Callable[..., _T], *arguments: Any) -> Future[_T]:
        try:
            return self._threads.submit(action, *arguments)
        except RuntimeError:
            raise RolloutFailed("the engine is closed") from None

    def _checked(self, item: PlacedMedia, on_done: Callable[[Future[None]], None]) -> Future[None]:
        """Check an item before any of its pixels are read, then start to read it."""
        content = item.content
        # A digest that someone made up must not match the picture of another request.
        if MediaContent.of(content.kind, content.frames, content.frames_per_s).digest != content.digest:
            raise ValueError(f"{_name(content)} has a digest of other content; create it with MediaContent.of")
        try:
            size = num_pixels(content)
            pieces = self.processor.family.pieces(content)
        except Exception as error:
            raise ValueError(f"{_name(content)} {_unreadable(error)}") from error
        if size > MAX_PIXELS:
            raise ValueError(
                f"{_name(content)} has {size} pixels in {len(content.frames)} frames: at most {MAX_PIXELS} are read; "
                "scale it down, or send fewer frames"
            )
        given = tuple(BlockShape(*block[1:]) for block in item.blocks)
        made = tuple(piece for piece in pieces if isinstance(piece, BlockShape))
        if given != made:
            raise ValueError(
                f"the blocks of {_name(content)} are {_text(given)}, but the model makes {_text(made)} of it; "
                "encode the prompt with the model's own processor"
            )
        reading = self._reading_of(content)
        reading.add_done_callback(on_done)
        return reading

    def _reading_of(self, content: MediaContent) -> Future[None]:
        digest = content.digest
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                return known
            future = self._known[digest] = self._submit(self._read, content)
            if len(self._known) > _NUM_KNOWN:
                self._known.popitem(last=False)
        future.add_done_callback(lambda _: self._forget_failure(digest, future))
        return future

    def _read(self, content: MediaContent) -> None:
        try:
            self.processor.inputs(content)
        except Exception as error:
            raise ValueError(f"{_name(content)} {_unreadable(error)}") from error

    def _forget_failure(self, digest: str, reading: Future[None]) -> None:
        """Let the next request try again: memory may only have been short for a moment."""
        with self._lock:
            has_failed = reading.cancelled() or reading.exception() is not None
            if has_failed and self._known.get(digest) is reading:
                del self._known[digest]

    def _wrong_blocks(self, item: PlacedMedia, end: int) -> str:
        if not item.blocks:
            return "has no tokens"
        for block in item.blocks:
            if block.length < 1 or block.start < end:
                return (
                    f"has a block of {block.length} tokens at {block.start}, where {end} tokens are taken; "
                    "blocks must not be empty and must be in the order of their tokens"
                )
            end = block.start + block.length
            time, height, width = block.grid
            if self._uses_grid and (min(block.grid) < 1 or math.prod(block.grid) != block.length):
                return f"has a block of {block.length} tokens with a grid of {time} × {height} × {width}"
            if not self._uses_grid and any(block.grid):
                return f"has a grid of {time} × {height} × {width}, but the model counts tokens of media like text"
            if not 0 <= block.time_step * max(time, 1) < _MAX_TIME:  # also false for NaN
                return f"has {time} times with a step of {block.time_step}: must be from 0 to {_MAX_TIME} together"
        return ""


def refuse_media(request: ModelRequest, model: str) -> NoReturn:
    """Raise ``RequestError`` because the model takes only text."""
    raise RequestError(
        f"request {request.request_id}: contains {_name(request.media[0].content)}, but {model} takes only text; use a "
        "vision model, or remove the images and videos"
    )


def _wrong_content(content: MediaContent) -> str:
    if content.kind not in ("image", "video"):
        return "must be an image or a video"
    if not content.frames or (content.kind == "image" and len(content.frames) != 1):
        return f"has {len(content.frames)} frames; an image has one, and a video at least one"
    is_digest = len(content.digest) == _DIGEST_CHARACTERS and set(content.digest) <= set("0123456789abcdef")
    return "" if is_digest else "has no valid digest; create it with MediaContent.of"


def _name(content: MediaContent) -> str:
    return f"{content.kind} {content.digest[:12]}"


def _unreadable(error: BaseException) -> str:
    return f"cannot be read: {type(error).__name__}: {error}"


def _text(shapes: Sequence[BlockShape]) -> str:
    shown = [
        f"{each.length} tokens ({'×'.join(map(str, each.grid))}, step {each.time_step:g})"
        for each in shapes[:_NUM_SHOWN]
    ]
    return ", ".join([*shown, f"and {len(shapes) - _NUM_SHOWN} more"] if len(shapes) > _NUM_SHOWN else shown)
