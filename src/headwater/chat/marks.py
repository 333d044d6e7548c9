"""Strings that have a meaning in a text that arrives piece by piece, for example ``<tool_call>``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


class Marks:
    """Finds the first of several strings. The answer does not depend on how the text was split."""

    def __init__(self, marks: Iterable[str]) -> None:
        # At the same place the longest mark counts.
        known = sorted({mark for mark in marks if mark}, key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None
        self._beginnings = frozenset(mark[:length] for mark in known for length in range(1, len(mark)))
        self._longest = max(map(len, known), default=0)

    def find(self, text: str, start: int, end: int, *, is_complete: bool) -> tuple[int, str] | None:
        """The place of the first mark in ``text[start:end]``, and the mark.

        If the text is not complete, a mark counts only if no other mark can turn out to begin before it.
        """
        match = self._pattern.search(text, start, end) if self._pattern else None
        if match is None or not (is_complete or match.start() < self.certain(text, start, end)):
            return None
        return match.start(), match.group()

    def certain(self, text: str, start: int, end: int) -> int:
        """The place up to which ``text[start:end]`` cannot belong to a mark that has not arrived completely."""
        for length in range(min(self._longest - 1, end - start), 0, -1):
            if text[end - length : end] in self._beginnings:
                return end - length
        return end


@lru_cache(maxsize=64)
def marks_of(marks: tuple[str, ...]) -> Marks:
    return Marks(marks)
