"""Something to do on the loop's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from headwater.core.errors import HeadwaterError


@dataclass(frozen=True)
class Command:
    """What to do, and the future of whoever asked for it."""

    action: Callable[[], None]
    after_drain: bool = False
    keeps_order: bool = False
    """Whether it waits behind commands that wait for a drain."""
    done: Future[None] = field(default_factory=Future)

    @property
    def is_called_off(self) -> bool:
        return self.done.cancelled()

    def carry_out(self) -> None:
        """A refusal belongs to whoever asked. Any other error also goes on to the loop: what the action was changing
        may be half changed, and nothing must be generated from it."""
        if not self.done.set_running_or_notify_cancel():
            return  # whoever asked for it has changed their mind
        try:
            self.action()
        except HeadwaterError as refusal:
            self.done.set_exception(refusal)
        except Exception as error:
            self.done.set_exception(error)
            raise
        else:
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """It will never be carried out."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)
