"""Keeps the calls of several threads to the same ranks apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.core.errors import RankFailed, WaitTimeout
from headwater.core.waits import wait_until

_TURN_LIMIT_S = 60.0
"""How long a call waits for an export that another thread has not read to its end."""


class Turns:
    """One call at a time: the messages of one call must not come between those of another one.

    A call waits while another thread reads an export. It is refused if that does not end, because then nothing reads
    the export any more.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        """``check`` raises once the ranks cannot be called any more."""
        self._check = check
        self._condition = threading.Condition()
        self._current: tuple[object, str] | None = None
        """Whose turn it is, and the name of the call."""

    @contextmanager
    def take(self, name: str) -> Iterator[None]:
        mine = (object(), name)

        def is_free() -> bool:
            self._check()
            return self._current is None

        try:
            with self._condition:
                wait_until(
                    self._condition,
                    is_free,
                    lambda: f"{name} waits until {self._doing} has ended",
                    kind="ranks",
                    hard_limit_s=_TURN_LIMIT_S,
                )
                self._current = mine
            yield
        except WaitTimeout as error:
            if self._current is mine:
                raise
            raise RankFailed(
                f"{name}: the ranks still execute {self._doing}, which has not been read to its end"
            ) from error
        finally:
            with self._condition:
                if self._current is mine:
                    self._current = None
                    self._condition.notify_all()

    @property
    def _doing(self) -> str:
        current = self._current
        return current[1] if current is not None else "nothing"
