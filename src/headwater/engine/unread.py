"""Requests whose images and videos are being read by other threads. They enter the queue when that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headwater.engine.sequence import EngineSequence


class UnreadRequests:
    """In the order of their arrival. The engine's thread owns them; other threads only set ``has_news``."""

    def __init__(self) -> None:
        self.has_news = False
        """Whether the media of a request may have been read since ``take_read`` looked."""
        self._sequences: dict[EngineSequence, None] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter(self._sequences)

    def add(self, sequence: EngineSequence) -> None:
        self._sequences[sequence] = None
        if _is_read(sequence):  # otherwise another thread will tell
            self.has_news = True

    def take_read(self) -> Iterator[EngineSequence]:
        """Requests whose media have been read, or cannot be read.

        Each is removed after the caller has processed it, so that it fails with the others if this fails.
        """
        self.has_news = False  # before looking: what is read from now on is news
        for sequence in list(filter(_is_read, self._sequences)):
            yield sequence
            del self._sequences[sequence]

    def take_out(self, wanted: Callable[[EngineSequence], bool]) -> list[EngineSequence]:
        """Remove the sequences for which ``wanted`` is true."""
        removed = list(filter(wanted, self._sequences))
        for sequence in removed:
            del self._sequences[sequence]
        return removed


def _is_read(sequence: EngineSequence) -> bool:
    return sequence.reading is None or sequence.reading.is_done
