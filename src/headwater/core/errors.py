"""Errors that a user can cause or fix.

The command line prints these as one message and exits with a non-zero status. Any other exception is a bug in
Headwater and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.core.requests import ModelResponse


class HeadwaterError(Exception):
    """Base class of errors whose message tells the user what happened, where, and how to fix it."""


class ConfigError(HeadwaterError):
    """One or more invalid settings, reported together."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = tuple(problems)
        where = f" in {source}" if source else ""
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count}{where}\n" + "\n".join(f"  - {problem}" for problem in self.problems))


class WrongArgument(ConfigError, ValueError):
    """An argument of an algorithm that is out of its range, in a call from Python code."""


class UnknownName(HeadwaterError):
    """A name that no registered extension has."""


class DataError(HeadwaterError):
    """A data file, row or prompt that cannot be used."""


class MissingColumn(HeadwaterError):
    """The algorithm needs a column of the batch that this run does not provide."""


class ModelError(HeadwaterError):
    """A model that is missing, damaged or not supported."""


class WeightsError(HeadwaterError):
    """A weight update that does not fit the model; the old weights stay in place."""


class WeightsIncomplete(WeightsError):
    """A weight update that failed midway. The engine generates nothing until a complete update succeeds."""


class TransferLost(WeightsError):
    """The engine's process ended during a weight update, which can be sent again to the process that replaces it."""


class LeftOut(WeightsError):
    """Servers did not take weights that others have already. They get no requests, and the others continue."""


class BaseMissing(TransferLost):
    """Adapters alone were sent to an engine that does not have the weights they belong to. All weights must be sent."""


class RewardFailed(HeadwaterError):
    """A reward could not be computed. A failure is never converted to a number."""

    def __init__(self, message: str = "", *, cause: str = "raised", spent: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        """One word, by which failures are counted: ``reward/failures/<cause>``."""
        self.spent = dict(spent or {})
        """What the call has used up, such as tokens of a judge: ``reward/spent_on_failures/<name>``."""


class RewardTimedOut(RewardFailed):
    """A reward function took longer than ``reward.timeout_s``."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message, cause="timed_out")


class RolloutFailed(HeadwaterError):
    """A rollout could not be completed."""


class AgentFailed(RolloutFailed):
    """An agent that talks to the model through an endpoint raised, ended with an error, or gave no result."""


class AgentTimedOut(AgentFailed):
    """An agent did not end within its time limit."""


class InvalidTrajectory(RolloutFailed):
    """A workflow returned something that cannot be trained on."""


class RequestError(RolloutFailed):
    """An invalid request: an empty prompt, an unknown token, or too many tokens."""


class QueueFull(RolloutFailed):
    """The engine's queue is full; the request may be sent again later."""


class ServerLost(RolloutFailed):
    """A server ended or stopped answering during a request. Another server can continue after ``partial``."""

    def __init__(self, message: str = "", partial: ModelResponse | None = None) -> None:
        super().__init__(message)
        self.partial = partial
        """What had arrived, with stop reason ``abort``; None if nothing had."""


class ServerKept(RolloutFailed):
    """A server cannot be drained, removed or used again now. Everything stays as it was."""


class ServerExists(RolloutFailed):
    """A server that is to be added is in the router already."""


class MemoryRefused(RolloutFailed):
    """The device has too little free memory to wake the engine. It stays asleep and may be woken later."""


class LogitsBroken(RolloutFailed):
    """The model computed NaN logits for a request. The engine continues and may be given better weights."""


class RunError(HeadwaterError):
    """A run directory that cannot be used or resumed."""


class CopyFailed(RunError):
    """The copy of a run (``trainer.checkpoint_dir``) cannot be read or written. The run directory is not affected."""


class RewardsUnreliable(RunError):
    """Too many scoring calls failed (``reward.max_failed_share``), so the run stops."""


class DiskFull(RunError):
    """There is no more space for a file of the run. What was saved before is complete."""

    def __init__(self, message: str, cause: str = "the disk is full", needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.cause = cause
        self.needed_bytes = needed_bytes
        """About how many bytes were to be written; 0 if that is not known."""


class DeviceMemoryFull(RunError):
    """A device has no more memory. The message names the settings that need less."""


class DamagedCheckpoint(RunError):
    """A checkpoint whose files are missing, truncated or changed."""


class OtherRankFailed(DataError):
    """Another rank cannot do its part of a call, so this rank does not start. The other rank's error says why."""


class RankFailed(RunError):
    """A rank of the learner has failed or ended. The run can be resumed from its last checkpoint."""


class WaitTimeout(HeadwaterError):
    """A named wait reached its hard limit."""
