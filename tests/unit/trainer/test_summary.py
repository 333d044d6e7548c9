"""The advice at the end of a run follows from its metrics."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headwater.observe.progress import Display
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.summary import suggestions, summarise


def record(step: int, **changes) -> dict:
    metrics = {
        "kind": "train", "step": step, "reward/mean": 0.5, "groups/informative_fraction": 0.6, "stopped_fraction": 1.0,
        "response_length/mean": 3.0, "time/step_s": 1.0, "time/generate_s": 0.4, "groups/dropped": 0,
    }  # fmt: skip
    return {**metrics, **changes}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"stopped_fraction": 0.1}, "raise rollout.max_new_tokens"),
        ({"reward/mean": 0.0, "groups/informative_fraction": 0.0}, "try an easier task"),
        ({"reward/mean": 1.0, "groups/informative_fraction": 0.0}, "try a harder task"),
        ({}, "Reward barely moved"),
    ],
)
def test_advice(tmp_path, changes, advice):
    run = RunDirectory.create(tmp_path, "run")
    assert advice in " ".join(suggestions(run, [record(step, **changes) for step in range(10)], [{}]))


def test_the_summary_is_told_from_the_run_directory_alone(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    run.append_metrics({"kind": "eval", "step": 0, "reward/mean": 0.2})
    for step in range(1, 6):
        run.append_metrics(record(step, **{"reward/mean": step / 5, "groups/dropped": 1}))
    run.append_metrics({"kind": "eval", "step": 5, "reward/mean": 0.9})
    output = io.StringIO()
    summarise(run, Display(Console(file=output, width=100)))
    text = output.getvalue()
    assert "0.200 → 0.900" in text
    assert "0.200 → 1.000" in text
    assert "dropped groups" in text
    assert run.curve_file.exists()
    assert "Reward barely moved" not in text
    assert "Look at responses" in text


@pytest.mark.parametrize(
    ("kept", "told"),
    [((5, 10), "everything up to step 10 is kept. Go on with:"), ((), "before the first checkpoint. Begin anew with:")],
)
def test_an_interrupted_run_is_told_how_to_go_on_and_no_more(tmp_path, kept, told):
    run = RunDirectory.create(tmp_path, "run")
    for step in range(1, 4):
        run.append_metrics(record(step))  # reward that barely moves, and no evaluation: both for good reason
    for step in kept:
        (run.checkpoints / f"step_{step:06d}").mkdir(parents=True)
    output = io.StringIO()
    summarise(run, Display(Console(file=output, width=300)), is_finished=False)
    assert f"{told}  headwater train --resume {run.path}" in output.getvalue()
    assert "→" not in output.getvalue().split("Reward curve")[1], "advice on settings does not fit half a run"
