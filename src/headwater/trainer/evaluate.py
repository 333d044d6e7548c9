"""Evaluation on held-out prompts: mean reward, and with several samples per prompt mean@k, best@k, maj@k and std@k."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.core.records import Prompt, Trajectory
from headwater.core.requests import derive_key
from headwater.data.load import MixedDataset, PromptDataset, prompts_of
from headwater.rollout.group import Dropped, PromptDraw, RolloutBatch, episode_metrics, num_turns, reward_metrics

Rollouts = Sequence[tuple[Prompt, Trajectory]]
RunBatch = Callable[[Sequence[PromptDraw], Callable[[], None]], RolloutBatch]
"""Runs prompts, and calls the function whenever one of them has ended: ``WorkflowExecutor.rollout_batch``."""

ANSWER_KEYS = ("pred", "answer")
"""The keys under which a scorer returns the answer that it has extracted from a response; maj@k votes over it."""
ACCURACY = "acc"
"""A scorer may return this number beside the reward; it then gets the same statistics over samples."""


@dataclass(frozen=True, slots=True)
class ResponseFacts:
    """What the metrics need of one response. Its tokens and texts are not kept, so that memory stays small."""

    uid: str
    sample: int
    reward: float
    reward_info: Mapping[str, Any]
    info: Mapping[str, Any]
    """What the workflow noted about the episode, without texts."""
    num_tokens: int
    is_stopped: bool

    @classmethod
    def of(cls, trajectory: Trajectory) -> ResponseFacts:
        info = {name: value for name, value in trajectory.info.items() if not _is_text(name, value)}
        (info["num_turns"],) = num_turns([trajectory])
        is_stopped = trajectory.stop_reason == "stop"
        num_tokens = len(trajectory.tokens) - trajectory.prompt_length
        return cls(
            trajectory.uid, trajectory.sample, trajectory.reward, trajectory.reward_info, info, num_tokens, is_stopped
        )


def _is_text(name: str, value: object) -> bool:
    return isinstance(value, str) and name != "ended_by"


@dataclass(frozen=True)
class Evaluation:
    reward_mean: float
    num_prompts: int
    num_dropped: int
    """Prompts without a result: rejected by the workflow, or failed with ``rollout.on_failure: drop``."""
    num_samples: int
    response_length_mean: float
    stopped_fraction: float
    """The share of responses that ended before the length limit."""
    rollouts: Rollouts
    """The responses of the first batch, to be shown."""
    sources: tuple[str, ...] = ()
    """The data sources of all prompts that have a result, sorted."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Metrics per data source and over samples, and those of the workflow and the scorer."""

    def metrics(self) -> dict[str, float]:
        return {
            "reward/mean": self.reward_mean,
            "response_length/mean": self.response_length_mean,
            "stopped_fraction": self.stopped_fraction,
            "num_prompts": self.num_prompts,
            "num_dropped": self.num_dropped,
            "num_samples": self.num_samples,
            **self.more,
        }


def evaluate(
    run_batch: RunBatch,
    dataset: PromptDataset,
    num_prompts: int,
    seed: int,
    *,
    batch_size: int = 0,
    save: Callable[[int, Rollouts], None] = lambda number, rollouts: None,
    progress: Callable[[int], None] = lambda num_done: None,
) -> Evaluation:
    """Run ``num_prompts`` rows, or all if it is 0; see ``rows_of``. The same seed and weights give the same responses.

    ``save`` gets the number and the responses of each batch of ``batch_size`` prompts, of which only the metrics are
    kept. ``progress`` gets the number of prompts that have ended, on another thread.
    """
    rows = rows_of(dataset, num_prompts)
    outcomes: list[tuple[Prompt, ResponseFacts]] = []
    dropped: list[Dropped] = []
    shown: Rollouts = ()
    num_groups = 0
    batch_size = batch_size or len(rows)
    ended = itertools.count(1)
    for number, start in enumerate(range(0, len(rows), batch_size)):
        prompts = prompts_of(dataset, rows[start : start + batch_size])
        draws = [PromptDraw(prompt, derive_key(seed, "eval", prompt.uid)) for prompt in prompts]
        batch = run_batch(draws, lambda: progress(next(ended)))
        rollouts = [(group.prompt, each) for group in batch.groups for each in group.trajectories]
        save(number, rollouts)
        shown = shown or rollouts
        outcomes += [(prompt, ResponseFacts.of(each)) for prompt, each in rollouts]
        dropped += batch.dropped
        num_groups += len(batch.groups)
    return summary(outcomes, shown, num_groups, len(dropped))


def rows_of(dataset: PromptDataset, num_prompts: int) -> Sequence[int]:
    """The first ``num_prompts`` rows, or all if it is 0. Several sources take turns, so that each has an equal share.

    A source that has no more rows leaves its turns to the others.
    """
    num_rows = min(num_prompts or len(dataset), len(dataset))
    parts = dataset.parts if isinstance(dataset, MixedDataset) else ()
    if len(parts) < 2:
        return range(num_rows)
    rounds = itertools.zip_longest(*(range(part.start, part.stop) for part in parts))
    in_turn = (row for rows in rounds for row in rows if row is not None)
    return list(itertools.islice(in_turn, num_rows))


def summary(
    outcomes: Sequence[tuple[Prompt, ResponseFacts]], shown: Rollouts, num_groups: int, num_dropped: int
) -> Evaluation:
    rewards = [each for values in _samples(outcomes, "").values() for each in values]
    count = len(outcomes)
    return Evaluation(
        reward_mean=sum(rewards) / len(rewards),
        num_prompts=num_groups,
        num_dropped=num_dropped,
        num_samples=len(rewards),
        response_length_mean=sum(each.num_tokens for _, each in outcomes) / count,
        stopped_fraction=sum(each.is_stopped for _, each in outcomes) / count,
        rollouts=shown,
        sources=tuple(sorted({prompt.data_source for prompt, _ in outcomes})),
        more={
            **episode_metrics([each for _, each in outcomes]),
            **reward_metrics(outcomes),
            **sample_metrics(outcomes),
        },
    )


def sample_metrics(outcomes: Sequence[tuple[Prompt, ResponseFacts]]) -> dict[str, float]:
    """``reward/best@k`` and the like, over all prompts and per data source; empty with one sample per prompt.

    ``mean@n`` and ``std@n`` are over the n samples of a prompt, then averaged over prompts. ``best@k`` and ``worst@k``
    are the expected best and worst of k of the n samples, exactly. ``maj@k`` is the score of the most frequent answer
    of k samples, averaged over consecutive blocks of k; it needs the answer that the scorer has extracted. k is n and
    every power of two below it. ``reward/acc/...`` has the same statistics of the number ``acc``.
    """
    metrics: dict[str, float] = {}
    for variable in ("", ACCURACY):
        of_prompts = _samples(outcomes, variable)
        answers = _answers(outcomes)
        most = max((len(each) for each in of_prompts.values()), default=0)
        if most < 2:
            continue
        sources = {source for source, _ in of_prompts}
        for source in (None, *sorted(sources)):
            chosen = {key: each for key, each in of_prompts.items() if source in (None, key[0])}
            parts = ["reward", *([source] if source is not None else []), *([variable] if variable else [])]
            found = _statistics(list(chosen.values()), [answers.get(key) for key in chosen], most)
            metrics |= {"/".join([*parts, name]): value for name, value in found}
    return metrics


def _statistics(
    of_prompts: Sequence[Sequence[float]], answers: Sequence[Sequence[Hashable] | None], most: int
) -> Iterator[tuple[str, float]]:
    yield f"mean@{most}", statistics.fmean(statistics.fmean(each) for each in of_prompts)
    yield f"std@{most}", statistics.fmean(statistics.pstdev(each) for each in of_prompts)
    for k in _sizes(most):
        enough = [each for each in of_prompts if len(each) >= k]
        if enough:
            yield f"best@{k}", statistics.fmean(expected_best(each, k) for each in enough)
            yield f"worst@{k}", statistics.fmean(-expected_best([-value for value in each], k) for each in enough)
        voting = [
            (each, said)
            for each, said in zip(of_prompts, answers, strict=True)
            if said is not None and len(said) == len(each) >= k
        ]
        if voting:
            yield f"maj@{k}", statistics.fmean(majority(each, said, k) for each, said in voting)


def _sizes(most: int) -> list[int]:
    powers = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return [*powers, most]


def expected_best(values: Sequence[float], k: int) -> float:
    """The mean of the largest of k values, over all ways to choose k of them."""
    ranked, total = sorted(values, reverse=True), math.comb(len(values), k)
    return sum(value * (math.comb(len(values) - 1 - rank, k - 1) / total) for rank, value in enumerate(ranked) if total)


def majority(values: Sequence[float], answers: Sequence[Hashable], k: int) -> float:
    """The score of the most frequent answer in each block of k samples; of equally frequent ones, the first."""
    scores = []
    for start in range(0, len(values) - k + 1, k):
        winner = Counter(answers[start : start + k]).most_common(1)[0][0]
        scores.append(values[start + list(answers[start : start + k]).index(winner)])
    return statistics.fmean(scores)


_Key = tuple[str, str]
"""The data source and the uid of a prompt."""


def _samples(outcomes: Sequence[tuple[Prompt, ResponseFacts]], variable: str) -> dict[_Key, list[float]]:
    """The value of each episode of each prompt: the mean over its pieces. Prompts without the variable are left out."""
    pieces: dict[_Key, dict[int, list[float]]] = {}
    for prompt, each in outcomes:
        value = each.reward_info.get(variable) if variable else each.reward
        if isinstance(value, (bool, int, float)) and math.isfinite(value):
            episodes = pieces.setdefault((prompt.data_source, each.uid), {})
            episodes.setdefault(each.sample, []).append(float(value))
    return {key: [statistics.mean(each) for each in episodes.values()] for key, episodes in pieces.items()}


def _answers(outcomes: Sequence[tuple[Prompt, ResponseFacts]]) -> dict[_Key, list[str]]:
    """The extracted answer of each episode. Prompts with an episode that has none are left out."""
    found: dict[_Key, dict[int, str | None]] = {}
    for prompt, each in outcomes:
        said = next((each.reward_info[name] for name in ANSWER_KEYS if name in each.reward_info), None)
        episodes = found.setdefault((prompt.data_source, each.uid), {})
        episodes[each.sample] = None if said is None else str(said)
    complete = {key: list(each.values()) for key, each in found.items()}
    return {key: [said for said in each if said is not None] for key, each in complete.items() if None not in each}
