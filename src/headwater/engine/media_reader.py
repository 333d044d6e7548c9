"""Images and videos of requests: they are checked and read by threads, before their requests enter the queue.

A picture that cannot be read, or whose tokens are not those that the model makes of it, fails only its own request.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NoReturn

from headwater.core.errors import RequestError
from headwater.core.media import MediaContent, PlacedMedia
from headwater.core.records import ModelRequest
from headwater.models.vision import VisionProcessor
from headwater.models.vision.family import BlockShape

_MAX_THREADS = 8
_NUM_KNOWN = 1024
"""How many items that were read are remembered, so that the samples of a group read their pictures once."""
_INPUT_BYTES = 2**30
"""Main memory for pictures, as tensors, that wait for the vision tower. Beyond it they are read again."""
_MAX_TIME = 2**24
"""Limit of rotary positions in time: float32 counts no further."""
_DIGEST_CHARACTERS = 64


@dataclass(frozen=True)
class Reading:
    """The media of a request that are being read."""

    request: ModelRequest
    shapes: Sequence[Future[tuple[BlockShape, ...]]]
    """Per item, the tokens that the model makes of it."""

    @property
    def is_done(self) -> bool:
        return all(each.done() for each in self.shapes)

    def error(self) -> RequestError | None:
        """Once it is done: why the request cannot be served."""
        for item, future in zip(self.request.media, self.shapes, strict=True):
            failure = future.exception()
            if failure is not None:
                return RequestError(f"request {self.request.request_id}: {failure}")
            given = tuple(BlockShape(*block[1:]) for block in item.blocks)
            if given != future.result():
                return RequestError(
                    f"request {self.request.request_id}: the blocks of {_name(item.content)} are {_text(given)}, but "
                    f"the model makes {_text(future.result())} of it; encode the prompt with the model's own processor"
                )
        return None


class MediaReader:
    """Reads the media of requests. Its methods may be called from any thread."""

    def __init__(self, processor: VisionProcessor, *, uses_grid: bool) -> None:
        # A separate cache: pictures of many requests wait at the same time.
        self.processor = VisionProcessor(
            processor.tokenizer, processor.family, processor.files, max_cache_bytes=_INPUT_BYTES
        )
        self._uses_grid = uses_grid
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(num_threads, "headwater-media")
        self._urgent = ThreadPoolExecutor(num_threads, "headwater-media-again")
        """For pictures that were read and dropped before their turn: they do not wait behind new ones."""
        self._known: OrderedDict[str, tuple[MediaContent, Future[tuple[BlockShape, ...]]]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for media that are wrong whatever the pictures show."""
        end = 0
        for item in request.media:
            problem = _wrong_content(item.content) or self._wrong_blocks(item, end)
            if problem:
                raise RequestError(f"request {request.request_id}: {_name(item.content)} {problem}")
            end = item.end

    def begin(self, request: ModelRequest, on_done: Callable[[], None]) -> Reading:
        """Start to read the media of a request. ``on_done`` is called by another thread after each item."""
        return Reading(request, [self._shapes_of(item.content, on_done) for item in request.media])

    def read(self, request: ModelRequest) -> None:
        """Read the media of a request and wait for it. Raises ``RequestError`` if they cannot be served."""
        reading = self.begin(request, lambda: None)
        wait(reading.shapes)
        error = reading.error()
        if error is not None:
            raise error

    def read_all(self, contents: Sequence[MediaContent]) -> None:
        """Make the tensors of all contents, in parallel, unless they are still in memory."""
        list(self._urgent.map(self.processor.inputs, contents))

    def close(self) -> None:
        for threads in (self._threads, self._urgent):
            threads.shutdown(wait=False, cancel_futures=True)

    def _shapes_of(self, content: MediaContent, on_done: Callable[[], None]) -> Future[tuple[BlockShape, ...]]:
        with self._lock:
            known = self._known.get(content.digest)
            # Contents with equal digests are compared as well: a digest that someone made up must not match.
            if known is not None and known[0] == content:
                self._known.move_to_end(content.digest)
                future = known[1]
            else:
                future = self._threads.submit(self._read, content)
                self._known[content.digest] = content, future
                if len(self._known) > _NUM_KNOWN:
                    self._known.popitem(last=False)
        if not future.done():
            future.add_done_callback(lambda _: on_done())
        return future

    def _read(self, content: MediaContent) -> tuple[BlockShape, ...]:
        if MediaContent.of(content.kind, content.frames, content.frames_per_s).digest != content.digest:
            raise ValueError(f"{_name(content)} has a digest of other content; create it with MediaContent.of")
        try:
            self.processor.inputs(content)
            pieces = self.processor.family.pieces(content)
        except Exception as error:
            raise ValueError(f"{_name(content)} cannot be read: {type(error).__name__}: {error}") from error
        return tuple(piece for piece in pieces if isinstance(piece, BlockShape))

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


def _text(shapes: Sequence[BlockShape]) -> str:
    return ", ".join(
        f"{each.length} tokens ({'×'.join(map(str, each.grid))}, step {each.time_step:g})" for each in shapes
    )
