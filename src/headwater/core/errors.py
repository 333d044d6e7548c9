"""Every error a user can cause or mend.

The command line prints these as one message and exits non-zero; anything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class HeadwaterError(Exception):
    """Base of all errors whose message is written for the user: what, where, and what to do about it."""


class ConfigError(HeadwaterError):
    """One or more wrong settings, all reported together."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = tuple(problems)
        where = f" in {source}" if source else ""
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count}{where}\n" + "\n".join(f"  - {problem}" for problem in self.problems))


class UnknownName(HeadwaterError):
    """A name that no registered extension answers to."""


class DataError(HeadwaterError):
    """A data file, row or prompt that cannot be used."""


class MissingColumn(HeadwaterError):
    """A part of the algorithm needs a column of the batch that nothing in this run provides."""


class ModelError(HeadwaterError):
    """A model that is missing, damaged or not supported."""


class WeightsError(HeadwaterError):
    """A weight update that does not fit the model; the old weights stay in place."""


class RewardFailed(HeadwaterError):
    """A reward could not be computed. This is never turned into a number."""


class RolloutFailed(HeadwaterError):
    """A rollout could not be completed."""


class RequestError(RolloutFailed):
    """A request that no engine could serve as it stands: an empty prompt, an unknown token, too many tokens."""


class QueueFull(RolloutFailed):
    """The engine's queue is at its limit; the request may be sent again later."""


class MemoryRefused(RolloutFailed):
    """The device has no room for what the engine is to take again. It stays asleep and may be woken later."""


class LogitsBroken(RolloutFailed):
    """The model made NaN of a request's tokens. The engine goes on, and may be given better weights."""


class RunError(HeadwaterError):
    """A run directory that cannot be used or resumed."""


class WaitTimeout(HeadwaterError):
    """A named wait reached its hard limit."""
