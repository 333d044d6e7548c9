"""Many cases in one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Name the case in the report of a failure: ``for mode in MODES: with case(mode): ...``."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {', '.join(map(repr, values))}")
        raise
