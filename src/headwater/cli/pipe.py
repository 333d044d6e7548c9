"""A reader of our output that goes away early, as ``| head`` does."""

from __future__ import annotations

import select
import sys

from rich.console import Console


class PipeConsole(Console):
    """For commands that only print: a closed pipe ends them, and not with the status of an error, as Rich would."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError, as this is called where it is handled


def is_reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads: other pipes and sockets may break too."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # there is none, or it is in memory
        return False
