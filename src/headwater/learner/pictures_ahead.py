"""Reads the images and videos of the next pass while the present one is computed.

Decoding and scaling a picture takes tens of milliseconds of a CPU core, which a GPU would wait for.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headwater.learner.packing import Pack
from headwater.models.vision import VisionProcessor

_MAX_THREADS = 8


class PicturesAhead:
    """Fills the cache of ``processor``, from which the vision tower takes its inputs."""

    def __init__(self, processor: VisionProcessor) -> None:
        self._processor = processor
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "pictures")
        self._started: dict[str, Future[Any]] = {}
        """By digest, what is being read or was read last."""

    def read(self, pack: Pack, following: Pack | None) -> None:
        """Return when the pictures of ``pack`` have been read. Those of ``following`` are read from now on."""
        self._started |= (wanted := self._start(pack))  # first: the following pass may need the same pictures
        self._started = {**wanted, **(self._start(following) if following is not None else {})}
        for future in wanted.values():
            future.result()

    def _start(self, pack: Pack) -> dict[str, Future[Any]]:
        contents = pack.media.contents if pack.media is not None else []
        return {
            each.digest: self._started.get(each.digest) or self._threads.submit(self._fill, each) for each in contents
        }

    def _fill(self, content: Any) -> None:
        # The tensors stay in the cache, which limits their bytes, and not in the future.
        self._processor.inputs(content)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
