"""What is generated and trained on in a step: numbers of prompts and samples, and how long the responses are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headwater.core.capabilities import UpdateMode
from headwater.core.errors import HeadwaterError

DEFAULT_MEAN_SHARE = 0.3
"""The mean length of a response as a share of ``rollout.max_new_tokens``, if no run says otherwise."""
DEFAULT_SIGMA = 0.9
"""The spread of the logarithm of the length."""
_SHARED_BY_A_GROUP = 0.5
"""The part of the variance that all samples of a prompt share: a hard prompt makes all of its responses long."""


@dataclass(frozen=True)
class Lengths:
    """Response lengths, group by group. A simulation draws whole groups, so that samples of a prompt stay together."""

    groups: NDArray[np.int_]
    """``[groups, samples]``: tokens."""
    source: str
    """Where they come from, for people."""
    prompt_tokens: int = 0
    """The mean length of the prompts; 0 if that is not known."""

    @classmethod
    def long_tailed(
        cls, num_samples: int, longest: int, *, mean: float | None = None, sigma: float = DEFAULT_SIGMA, seed: int = 0
    ) -> Lengths:
        """Log-normal lengths with this mean before the limit ``longest`` is applied."""
        mean = DEFAULT_MEAN_SHARE * longest if mean is None else mean
        generator = np.random.default_rng(seed)
        shared = generator.standard_normal((4096, 1)) * math.sqrt(_SHARED_BY_A_GROUP)
        own = generator.standard_normal((4096, num_samples)) * math.sqrt(1 - _SHARED_BY_A_GROUP)
        drawn = np.exp(math.log(mean) - sigma**2 / 2 + sigma * (shared + own))
        groups = np.clip(np.rint(drawn), 1, longest).astype(int)
        return cls(groups, f"assumed: log-normal, mean {mean:,.0f}, sigma {sigma:g}, at most {longest:,} tokens")

    @classmethod
    def of_run(cls, folder: Path, num_samples: int) -> Lengths:
        """The lengths in the rollout files of a run directory."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        files = sorted((folder / "rollouts").glob("*.parquet"))
        if not files:
            raise HeadwaterError(
                f"--run {folder}: no rollout files; the run must have written some (trainer.save_rollouts_every_steps)"
            )
        rows: list[list[int]] = []
        num_prompt = num_rows = 0
        for file in files:
            table = pq.read_table(file, columns=["uid", "prompt_length", "tokens"])
            lengths = pc.subtract(pc.list_value_length(table["tokens"]), table["prompt_length"])
            groups: dict[str, list[int]] = {}
            for uid, length in zip(table["uid"].to_pylist(), lengths.to_pylist(), strict=True):
                groups.setdefault(uid, []).append(max(1, length))
            num_prompt += sum(table["prompt_length"].to_pylist())
            num_rows += len(table)
            rows += [
                (group * math.ceil(num_samples / len(group)))[:num_samples]  # fewer samples are repeated
                for group in groups.values()
            ]
        return cls(np.array(rows), f"measured: {len(rows):,} groups of {folder}", round(num_prompt / num_rows))

    @property
    def mean(self) -> float:
        return float(self.groups.mean())

    @property
    def longest(self) -> int:
        return int(self.groups.max())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training run as its scheduler sees it."""

    num_prompts: int
    """Per step: ``trainer.num_prompts_per_step``."""
    num_samples: int
    """Per prompt: ``rollout.num_samples_per_prompt``."""
    prompt_tokens: int
    """Of every prompt."""
    lengths: Lengths
    max_staleness: int = 0
    max_concurrent: int = 0
    on_stale: Literal["mask", "drop", "wait"] = "mask"
    update_mode: UpdateMode = "in_flight"
    waits_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros((1, 1)))
    """``[groups, samples]``: how long an episode waits for its tools and rewards. A smaller array is repeated."""
    timeout_s: float = 1800.0
    """``rollout.timeout_s``."""
    episode_timeout_s: float = 1800.0
    shares_prompts: bool = True
    """``learner.share_prompts``: the learner computes the prompt of a group once."""
    is_deterministic: bool = False
    """``engine.deterministic``: synchronous steps then start groups without waiting for others."""

    @property
    def num_episodes(self) -> int:
        """Per step."""
        return self.num_prompts * self.num_samples

    def num_computed(self, num_groups: int, num_episodes: int, num_responded: int) -> int:
        """Tokens that the learner computes for a batch with ``num_responded`` tokens of responses."""
        return num_responded + self.prompt_tokens * (num_groups if self.shares_prompts else num_episodes)

    def length_of(self, number: int, sample: int) -> int:
        """The response length of one sample of the ``number``-th prompt. The groups are repeated."""
        return int(_at(self.lengths.groups, number, sample))

    def wait_of(self, number: int, sample: int) -> float:
        """As ``length_of``: how long an episode waits for its tools and rewards."""
        return _at(self.waits_s, number, sample)


def _at(values: NDArray[Any], number: int, sample: int) -> float:
    return float(values[number % values.shape[0], sample % values.shape[1]])
