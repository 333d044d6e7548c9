"""What is done with every token of a batch does not run Python code for every token."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.algorithms.diagnostics import staleness_histogram
from headwater.core.records import NOT_SAMPLED, Trajectory, make_arrays
from headwater.rollout.flight import Dispatch, version_runs
from headwater.rollout.group import Group, PromptDraw, pad_trajectories, score_columns
from headwater.rollout.snapshot import RolloutSnapshot
from headwater.rollout.staleness import Finished
from headwater.trainer.tables import write_rollouts


def sampled(num_tokens: int, sample: int) -> Trajectory:
    """Two turns, of which the first began under an older version."""
    turn, told = num_tokens // 2, 3
    return Trajectory(
        uid=tiny.prompt().uid,
        sample=sample,
        tokens=tuple(range(5, 5 + 4 + 2 * turn + told)),
        prompt_length=4,
        loss_mask=(0,) * 4 + (1,) * turn + (0,) * told + (1,) * turn,
        logprobs=(0.0,) * 4 + (-0.5,) * (2 * turn + told),
        versions=(NOT_SAMPLED,) * 4 + (3,) * (turn - 1) + (4,) + (NOT_SAMPLED,) * told + (4,) * turn,
        reward=1.0,
        stop_reason="stop",
        turn_rewards=(0.25, 0.75),
    )


def num_events(action: Callable[[], object]) -> int:
    """Calls of Python and C functions. A generator counts once per value."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    gc.collect()
    gc.disable()  # a collection would call the finalizers of what other tests have left
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def work(num_tokens: int, folder) -> dict[str, Callable[[], object]]:
    trajectories = [sampled(num_tokens, sample) for sample in range(3)]
    group = Group(tiny.prompt(), tuple(trajectories))
    padded = pad_trajectories(trajectories, 0).batch
    finished = Finished(Dispatch(0, PromptDraw(tiny.prompt(), 0, index=0)), group, 3, 3, {})
    snapshot = RolloutSnapshot({}, {}, finished=(finished,))
    text = snapshot.to_json()
    return {
        "making a trajectory": lambda: sampled(num_tokens, 0).arrays,
        "the oldest version": group.oldest_version,
        "masking older tokens": lambda: group.without_older(4)[0].oldest_version(),
        "padding": lambda: pad_trajectories(trajectories, 0),
        "scores": lambda: score_columns(trajectories, np.zeros((3, 2 * num_tokens), np.float32)),
        "versions of a response": lambda: version_runs(trajectories[0].versions),
        "the histogram of ages": lambda: staleness_histogram(padded["versions"], padded["response_mask"], 4),
        "a rollout file": lambda: write_rollouts(
            folder / "r.parquet", 1, [(group.prompt, replace(each, reward=1.0)) for each in trajectories]
        ),
        "a snapshot": snapshot.to_json,
        "reading a snapshot": lambda: RolloutSnapshot.from_json(text, lambda *_: finished.dispatch.draw),
    }


def test_the_python_work_of_a_batch_does_not_grow_with_its_tokens(tmp_path):
    few, many = work(40, tmp_path), work(4000, tmp_path)
    for name in few:
        few[name]()  # the first call imports and fills caches
        counts = [num_events(each[name]) for each in (few, many)]
        assert counts[1] <= counts[0] + 50, (name, counts)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([NOT_SAMPLED, 0, 1, 7])), min_size=1, max_size=12))
def test_arrays_and_turns_are_what_the_tuples_say(tokens):
    versions = (NOT_SAMPLED, *(version for _, version in tokens))
    mask = (0, *(int(trained and version >= 0) for trained, version in tokens))
    size = len(versions)
    made = Trajectory("row", 0, tuple(range(size)), 1, mask, (-0.1,) * size, versions, 0.5, "stop")
    turns: list[list[int]] = []
    for at, version in enumerate(versions):
        if version != NOT_SAMPLED:
            if versions[at - 1] == NOT_SAMPLED:
                turns.append([])
            turns[-1].append(at)
    assert made.turn_ends == tuple(([at for at in turn if mask[at]] or turn)[-1] for turn in turns)
    trained = [version for version, is_trained in zip(versions, mask, strict=True) if is_trained]
    group = Group(replace(tiny.prompt(), uid="row"), (made,))
    assert group.oldest_version() == min(trained, default=None)
    masked, num_masked = group.without_older(1)
    expected = tuple(int(one and version >= 1) for one, version in zip(mask, versions, strict=True))
    assert masked.trajectories[0].loss_mask == expected
    assert num_masked == sum(mask) - sum(expected)
    together = [replace(made, sample=1), made, replace(tiny.trajectory(size), sample=2)]  # the second has its arrays
    make_arrays(together)
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        for each in (made, masked.trajectories[0], *together):
            assert np.array_equal(getattr(each.arrays, name), getattr(each, name))


def test_a_mask_or_version_that_makes_no_sense_is_refused():
    good = tiny.trajectory(1)
    with pytest.raises(ValueError, match="values other than 0 and 1"):
        replace(good, loss_mask=(*good.loss_mask[:-1], 2))
    with pytest.raises(ValueError, match="a trained token has no policy version"):
        replace(good, loss_mask=(*good.loss_mask[:-1], 1), versions=(*good.versions[:-1], NOT_SAMPLED))
