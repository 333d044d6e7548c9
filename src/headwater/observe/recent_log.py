"""The last warnings and errors of this process, for whoever asks what happened."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

_MAX_CHARACTERS = 500


@dataclass(frozen=True)
class LogLine:
    time: float
    level: str
    message: str


class RecentLog(logging.Handler):
    """Keeps the newest few records of warning level and above."""

    def __init__(self, count: int = 20) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[LogLine] = deque(maxlen=count)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit their message are somebody else's mistake
            message = str(record.msg)
        self._lines.append(LogLine(record.created, record.levelname, message[:_MAX_CHARACTERS]))

    def lines(self) -> list[LogLine]:
        """Oldest first."""
        return list(self._lines)
