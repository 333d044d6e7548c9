"""Statistics over the samples of held-out prompts, in batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny

from headwater.core.records import DropKind
from headwater.data.sampler import DataPart
from headwater.rollout.group import Dropped, Group, RolloutBatch
from headwater.trainer.checkpoint import BestStep
from headwater.trainer.evaluate import evaluate, expected_best, majority, rows_of

REWARDS = {"a0": [1.0, 0.0, 0.0, 1.0], "a1": [0.0, 0.0, 0.0, 0.0], "b0": [1.0, 1.0, 1.0, 0.0]}
ANSWERS = {"a0": ["7", "3", "3", "7"], "a1": ["1", "2", "3", "4"], "b0": ["5", "5", "5", "6"]}
PROMPTS = [replace(tiny.prompt(), uid=uid, data_source=uid[0]) for uid in [*REWARDS, "lost"]]


def run_batch(draws, on_group) -> RolloutBatch:
    groups = []
    for draw in draws:
        on_group()
        uid = draw.prompt.uid
        if uid not in REWARDS:
            continue
        samples = [
            replace(
                tiny.trajectory(number, uid=uid, sample=number),
                reward=reward,
                reward_info={"pred": ANSWERS[uid][number], "acc": reward > 0},
            )
            for number, reward in enumerate(REWARDS[uid])
        ]
        groups.append(Group(draw.prompt, tuple(samples)))
    dropped = [Dropped(draw.prompt.uid, DropKind.REJECTED, "why") for draw in draws if draw.prompt.uid not in REWARDS]
    return RolloutBatch(tuple(groups), tuple(dropped))


def test_every_prompt_is_evaluated_in_batches_and_the_samples_are_summarised():
    saved: list[tuple[int, list[str]]] = []
    ended: list[int] = []
    result = evaluate(
        run_batch,
        PROMPTS,
        0,
        seed=0,
        batch_size=2,
        save=lambda number, rollouts: saved.append((number, [each.uid for _, each in rollouts])),
        progress=ended.append,
    )
    assert ended == [1, 2, 3, 4]
    assert saved == [(0, ["a0"] * 4 + ["a1"] * 4), (1, ["b0"] * 4)]
    assert [prompt.uid for prompt, _ in result.rollouts] == ["a0"] * 4 + ["a1"] * 4, "only the first batch is kept"
    assert (result.num_prompts, result.num_dropped, result.num_samples) == (3, 1, 12)
    found = result.metrics()
    assert found["reward/mean"] == found["reward/mean@4"] == pytest.approx(5 / 12)
    expected = {
        "reward/a/mean@4": 0.25,
        "reward/b/mean@4": 0.75,
        "reward/best@4": 2 / 3,
        "reward/a/best@4": 0.5,
        "reward/a/best@2": (5 / 6) / 2,  # of the six pairs of a0, one has no success
        "reward/worst@4": 0.0,
        "reward/b/worst@2": 0.5,
        "reward/std@4": (0.5 + 0.0 + 3**0.5 / 4) / 3,
        "reward/maj@4": (1.0 + 0.0 + 1.0) / 3,  # 7 is named first and as often as 3
        "reward/b/maj@2": 1.0,
        "reward/acc/best@4": 2 / 3,
        "reward/a/acc/maj@4": 0.5,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name
    whole = evaluate(run_batch, PROMPTS, 0, seed=0)
    assert whole.metrics() == found, "batches do not change the result"
    assert evaluate(run_batch, PROMPTS, 2, seed=0).num_prompts == 2


class Mixed(list):
    """Rows of three sources, of 2, 1 and 1 rows."""

    parts = (DataPart("a", 0, 2), DataPart("b", 2, 3), DataPart("lost", 3, 4))


def test_several_sources_take_turns_so_that_each_is_evaluated():
    drawn: list[str] = []

    def run(draws, on_group) -> RolloutBatch:
        drawn.extend(draw.prompt.uid for draw in draws)
        return run_batch(draws, on_group)

    result = evaluate(run, Mixed(PROMPTS), 2, seed=0, batch_size=1)
    assert drawn == ["a0", "b0"]
    assert result.sources == ("a", "b"), "of all batches"
    assert {prompt.data_source for prompt, _ in result.rollouts} == {"a"}
    assert list(rows_of(Mixed(PROMPTS), 0)) == [0, 2, 3, 1], "a source that has no more rows leaves its turns to others"
    assert list(rows_of(PROMPTS, 3)) == [0, 1, 2]


def test_one_sample_has_no_statistics_over_samples():
    one = evaluate(lambda *_: RolloutBatch((Group(PROMPTS[0], (tiny.trajectory(0, uid="a0"),)),)), PROMPTS, 1, 0)
    assert not [name for name in one.metrics() if "@" in name]


def test_the_expected_best_is_that_of_all_choices():
    assert expected_best([3.0, 1.0, 2.0], 1) == pytest.approx(2.0)
    assert expected_best([3.0, 1.0, 2.0], 2) == pytest.approx((3 + 3 + 2) / 3)
    assert expected_best([3.0, 1.0, 2.0], 3) == pytest.approx(3.0)
    assert majority([1.0, 0.0, 0.0, 1.0], ["x", "y", "y", "x"], 2) == 0.5


def test_the_best_step_is_that_of_the_metric_and_an_unknown_metric_is_refused():
    smaller = BestStep("eval/response_length/mean", "min")
    values = [(1, 5.0), (2, 6.0), (3, 5.0), (4, 4.0), (5, float("nan"))]
    assert [step for step, value in values if smaller.is_improved(step, {"response_length/mean": value})] == [1, 4]
    assert not BestStep("", "max").is_improved(1, {})
    known = "has no such metric; use one of eval/num_prompts, eval/reward/mean"
    with pytest.raises(Exception, match=f"trainer.best_metric = eval/acc: the evaluation of step 3 {known}"):
        BestStep("eval/acc", "max").is_improved(3, {"reward/mean": 1.0, "num_prompts": 2})
