"""What a run did when: which groups each batch took, and under which policy versions their tokens were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.core.errors import RunError
from headwater.rollout.segments import Requests, requests_from_json


@dataclass(frozen=True)
class RecordedGroup:
    id: int
    uid: str
    index: int
    epoch: int
    requests: Requests

    @property
    def first_version(self) -> int:
        return min((made[0][0] for made in self.requests.values() if made), default=0)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> RecordedGroup:
        requests = requests_from_json(record["requests"])
        return cls(record["id"], record["uid"], record["index"], record["epoch"], requests)


@dataclass(frozen=True)
class RecordedStep:
    groups: tuple[RecordedGroup, ...]
    """In the order in which the learner took them."""
    weights: str
    """Checksum of the policy that the step published."""


@dataclass(frozen=True)
class Schedule:
    steps: tuple[RecordedStep, ...]

    @classmethod
    def read(cls, ledger: Sequence[Mapping[str, Any]], where: str) -> Schedule:
        """From the lines of ``ledger.jsonl``."""
        steps = sorted((each for each in ledger if each["kind"] == "step"), key=lambda each: each["step"])
        if not steps:
            raise RunError(f"{where}: no step is recorded there, so there is nothing to replay")
        numbers = [each["step"] for each in steps]
        if numbers != list(range(1, len(steps) + 1)):
            missing = next(number for number in range(1, len(steps) + 1) if number not in numbers)
            raise RunError(f"{where}: step {missing} is missing; the run can be replayed only from its beginning")
        return cls(
            tuple(RecordedStep(tuple(map(RecordedGroup.read, each["trained"])), each["weights"]) for each in steps)
        )

    def first(self, num_steps: int) -> Schedule:
        return Schedule(self.steps[:num_steps])

    def num_parts(self) -> Counter[int]:
        """By version, how many parts of responses were made under it."""
        return Counter(
            version
            for step in self.steps
            for group in step.groups
            for made in group.requests.values()
            for version, _ in made
        )

    @property
    def has_mixed_responses(self) -> bool:
        """Whether the weights changed in the middle of a response."""
        return any(len(made) > 1 for step in self.steps for group in step.groups for made in group.requests.values())
