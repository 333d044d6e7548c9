"""Input and output of both sides of ``grpo_step_vs_trl.py``. Needs only Python, so that both sides can import it."""

from __future__ import annotations

import json
import resource
import statistics
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

SYSTEM = "Be brief."
QUESTIONS = (
    "Ann has 12 apples and buys 3 bags of 5 apples. How many has she now?",
    "A train goes 60 miles an hour. How far does it go in 3 hours and a half?",
    "Tom reads 14 pages a day. How many days does a book of 210 pages take?",
    "A shirt costs 18 dollars and a hat 7. What do two shirts and a hat cost?",
    "A third of the 24 pupils in a class walk to school. How many do not?",
    "Mia saves 4 dollars a week. How many weeks until she has 60 dollars?",
    "A baker makes 8 trays of 12 rolls and sells 70. How many rolls are left?",
    "Sam is 9 and his sister is twice as old. How old is she in 5 years?",
)


@dataclass(frozen=True)
class Job:
    """One side's work: ``num_steps`` training steps on the same prompts, of which the first warms up."""

    model: str
    """A folder in the Hugging Face format."""
    num_samples: int
    num_new_tokens: int
    num_steps: int
    learning_rate: float
    num_threads: int
    microbatch: int
    """Tokens in one pass of ours, samples in one pass of TRL's."""

    @property
    def chats(self) -> list[list[dict[str, str]]]:
        return [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": each}] for each in QUESTIONS]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step. ``backward`` holds the loss and its bookkeeping, ``rest`` all that has no name here."""

    step: float
    generate: float
    forward: float
    backward: float
    optimizer: float
    cpu: float
    """Processor time of all threads, which other work on the machine disturbs less than the clock."""

    @property
    def rest(self) -> float:
        return self.step - self.generate - self.forward - self.backward - self.optimizer


@dataclass(frozen=True)
class Outcome:
    steps: list[StepTimes]
    prompt_tokens: list[int]
    """Of each prompt, ascending."""
    new_tokens: int
    """Trained tokens of one step."""
    num_rewards: int
    """Different rewards in the last step."""
    peak_gib: float
    versions: dict[str, str]

    @property
    def step_s(self) -> float:
        """The median of the steps after the first."""
        return statistics.median(each.step for each in self.steps[1:])

    def mean(self, part: str) -> float:
        return statistics.fmean(getattr(each, part) for each in self.steps[1:])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Outcome:
        values = json.loads(path.read_text())
        return cls(**values | {"steps": [StepTimes(**each) for each in values["steps"]]})


def score(text: str) -> float:
    """A reward that is another one for every text, so that every sample has an advantage and none is skipped."""
    return zlib.crc32(text.encode()) / 2**32


def peak_gib() -> float:
    """The most memory this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
