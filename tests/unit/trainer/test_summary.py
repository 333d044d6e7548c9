"""The advice at the end of a run follows from its metrics."""

from __future__ import annotations

import io

from rich.console import Console

from headwater.observe.progress import Display
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.summary import draw_reward_curve, how_to_resume, suggestions, summarise


def record(step: int, **changes) -> dict:
    metrics = {
        "kind": "train", "step": step, "reward/mean": 0.5, "groups/informative_fraction": 0.6, "stopped_fraction": 1.0,
        "response_length/mean": 3.0, "time/step_s": 1.0, "time/generate_s": 0.4, "groups/dropped": 0,
    }  # fmt: skip
    return {**metrics, **changes}


def test_advice(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    for changes, advice in (
        ({"stopped_fraction": 0.1}, "raise rollout.max_new_tokens"),
        ({"reward/mean": 0.0, "groups/informative_fraction": 0.0}, "try an easier task"),
        ({"reward/mean": 1.0, "groups/informative_fraction": 0.0}, "already get full reward: try harder prompts"),
        ({}, "Reward barely moved"),
    ):
        assert advice in " ".join(suggestions(run, [record(step, **changes) for step in range(10)], [{}])), changes
    assert suggestions(run, [], [{}])[-1] == f"Look at responses: headwater eval {run.path} --show 5"
    run.write_config("data:\n  train: ['python:rows']\n")
    assert "Parquet files in" in suggestions(run, [], [{}])[-1], "the command has no objects of a Python program"


def test_the_curve_is_a_picture(tmp_path):
    draw_reward_curve(tmp_path / "c.png", [(1, 0.1), (2, 0.4)], [(0, 0.1), (2, 0.5)], "title")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    draw_reward_curve(tmp_path / "empty.png", [], [], "no steps yet")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_the_summary_needs_only_the_run_directory(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    run.append_metrics({"kind": "eval", "step": 0, "reward/mean": 0.2})
    for step in range(1, 6):
        drops = {"groups/dropped_invalid": 1, "groups/filtered": 2, "groups/lost_samples": 1, "prompts/left_out": 7}
        run.append_metrics(record(step, **{"reward/mean": step / 5, **drops}))
    run.append_metrics({"kind": "eval", "step": 5, "reward/mean": 0.9, "num_dropped": 3})
    output = io.StringIO()
    summarise(run, Display(Console(file=output, width=100)))
    text = output.getvalue()
    assert "0.200 → 0.900" in text
    assert "0.200 → 1.000" in text
    rows = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert "dropped groups 15 (10 filtered, 5 invalid)" in rows
    assert "lost samples 5" in rows
    assert "prompts left out 7 over data.max_prompt_tokens" in rows
    assert "held-out prompts without a result 3 in 2 evaluations" in rows
    assert run.curve_file.exists()
    assert "Reward barely moved" not in text
    assert "Open it in a browser: headwater ui" in text
    assert "Look at responses" in text


def test_an_interrupted_run_is_told_how_to_resume(tmp_path):
    for kept, told in (
        ((5, 10), "everything up to step 10 is saved. Resume with:"),
        ((), "before the first checkpoint. Start again with:"),
    ):
        run = RunDirectory.create(tmp_path, "run")
        for step in range(1, 4):
            run.append_metrics(record(step))  # the reward barely moves, and there is no evaluation
        for step in kept:
            (run.checkpoints / f"step_{step:06d}").mkdir(parents=True)
        output = io.StringIO()
        summarise(run, Display(Console(file=output, width=300)), is_finished=False)
        assert f"{told}  headwater train --resume {run.path}" in output.getvalue()
        assert "→" not in output.getvalue().split("Reward curve")[1], "advice for a complete run does not apply"


def test_a_run_with_objects_of_python_is_resumed_there(tmp_path):
    for number, value in enumerate(("train: ['python:rows']", "function: python:<lambda>")):
        run = RunDirectory.create(tmp_path, f"run{number}")
        run.config_file.write_text(value)
        (run.checkpoints / "step_000005").mkdir(parents=True)
        assert how_to_resume(run) == (
            f'Interrupted; everything up to step 5 is saved. Resume with:  train(..., resume="{run.path}") in Python, '
            "with the same data and functions"
        )


def test_an_interrupted_run_gets_advice_that_more_steps_would_not_change(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    for step in range(1, 4):
        run.append_metrics(record(step, **{"reward/mean": 0.0, "groups/informative_fraction": 0.0}))
    output = io.StringIO()
    summarise(run, Display(Console(file=output, width=300)), is_finished=False)
    advice, last = output.getvalue().splitlines()[-2:]
    assert "→ Nearly every group got the same low reward" in advice
    assert last.startswith("Interrupted before the first checkpoint")


def test_one_step_and_one_evaluation_are_no_change(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    run.append_metrics({"kind": "eval", "step": 0, "reward/mean": 0.25})
    run.append_metrics(record(1))
    output = io.StringIO()
    summarise(run, Display(Console(file=output, width=300)), is_finished=False)
    assert "0.250 (only step 0 was evaluated)" in output.getvalue()
    assert "→" not in output.getvalue()


def test_the_shares_of_the_learner_add_up_and_rollouts_are_separate(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    seconds = {"wait": 0.4, "experience": 0.1, "train": 0.45, "publish": 0.05, "generate": 0.3, "reward": 0.25}
    run.append_metrics(record(1, **{f"time/{name}_s": spent for name, spent in seconds.items()}))
    output = io.StringIO()
    summarise(run, Display(Console(file=output, width=300)))
    rows = dict(line.strip("│ \n").split("│") for line in output.getvalue().splitlines() if line.count("│") == 3)
    told = {name.strip(): value.strip() for name, value in rows.items()}
    learner = ["wait for rollouts", "experience", "train", "publish"]
    assert [told[name] for name in learner] == ["40%", "10%", "45%", "5%"]
    assert told["rollouts (concurrent)"] == "generate 30%, reward 25%"
    assert sum("%" in value for value in told.values()) == 5
