"""Input and output of the sides of ``end_to_end.py``. Needs only Python, so that every side can import it."""

from __future__ import annotations

import json
import random
import resource
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STAGES = ("rollout", "experience", "train", "publish", "other")
"""They follow one another and add up to the time of a step."""
DETAILS = ("generate", "reward")
"""Parts of ``rollout``. They may overlap."""


@dataclass(frozen=True)
class Job:
    """One side's work: ``num_steps`` training steps on the same prompts."""

    model: str
    """A folder in the Hugging Face format."""
    device: str
    dtype: str
    """Of the passes and of the engine. The trained weights are float32."""
    chats: list[list[dict[str, str]]]
    """The prompts of every step."""
    prompt_tokens: list[int]
    """Of each prompt, ascending."""
    num_samples: int
    num_new_tokens: int
    num_steps: int
    learning_rate: float
    num_threads: int
    """Of torch; 0 leaves the choice to torch."""
    microbatch: int
    """Tokens in one pass of Headwater, samples in one pass of TRL."""
    settings: list[str]
    """Further settings of Headwater, as ``KEY=VALUE``."""
    lora_rank: int = 0
    """Adapters of this rank are trained, and the model is in ``dtype``; 0 trains all weights."""
    checkpoint_activations: bool = False
    use_vllm: bool = False
    vllm_memory: float = 0.3
    """Share of the GPU for vLLM, with its weights."""

    @property
    def num_responses(self) -> int:
        return len(self.chats) * self.num_samples

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Step:
    """Seconds from the end of the step before to the end of this one, with everything that happens between."""

    seconds: float
    stages: dict[str, float]
    """By the names in ``STAGES`` and ``DETAILS``. ``other`` is made from the rest."""

    @classmethod
    def of(cls, seconds: float, stages: dict[str, float]) -> Step:
        known = sum(stages.get(name, 0.0) for name in STAGES)
        return cls(seconds, {**stages, "other": seconds - known})


@dataclass(frozen=True)
class Outcome:
    load_s: float
    """From the start of the process to that of the first step: imports, model, engine, data."""
    steps: list[Step]
    new_tokens: int
    """Trained tokens of the last step."""
    num_rewards: int
    """Different rewards in the last step."""
    peak_gib: float
    """GPU memory of tensors at its highest, or resident main memory without a GPU."""
    held_gib: list[float]
    """The same at the end of every step. It must not grow."""
    versions: dict[str, str]

    @property
    def step_s(self) -> float:
        """The median of the steps after the first."""
        return statistics.median(each.seconds for each in self.steps[1:])

    def median(self, stage: str) -> float:
        return statistics.median(each.stages.get(stage, 0.0) for each in self.steps[1:])

    def summary(self) -> dict[str, object]:
        stages = {name: self.median(name) for name in (*STAGES, *DETAILS)}
        return {"first_step_s": self.steps[0].seconds, "step_s": self.step_s, "stages": stages, **asdict(self)}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Outcome:
        values = json.loads(path.read_text())
        return cls(**values | {"steps": [Step(**each) for each in values["steps"]]})


def compute_score(**_: Any) -> float:
    """A reward function. Random weights give no useful answer, and different rewards give every sample an advantage, so
    that none is skipped.

    It is here because the workers of a run import the file of their function, and this one imports nothing large.
    """
    return random.SystemRandom().random()


def host_peak_gib() -> float:
    """The most main memory that this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
