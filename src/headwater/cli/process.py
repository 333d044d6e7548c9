"""How a command ends: its exit status, Ctrl-C at any time, and a closed output."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from headwater.core.interpreter import ImportGuard, is_importing

if TYPE_CHECKING:
    from rich.console import Console

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141
"""The status that a shell shows for a program that SIGPIPE ended."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, but not during an import. A second Ctrl-C ends the process there."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield  # another handler stays in place
        return
    guard = ImportGuard()

    def handle(number: int, frame: FrameType | None) -> None:
        if guard.defers(number, frame):
            return
        if is_importing(frame):
            # An exception raised here could be swallowed, and nothing has started that would need to be cleaned up.
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"interrupted\n")
            os._exit(EXIT_INTERRUPTED)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        is_late, guard.is_waiting = guard.is_waiting, False
    if is_late:
        raise KeyboardInterrupt


def pipe_console(**options: Any) -> Console:
    """A console for commands that only print. A closed pipe ends them, and not with an error status as Rich would."""
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError that is being handled

    return PipeConsole(emoji=False, **options)


def is_reader_gone() -> bool:
    """Whether standard output is a pipe without a reader. Other pipes and sockets may break too."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # there is no standard output, or it is in memory
        return False
