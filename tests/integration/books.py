"""The ledger of a run that is complete: what became of every prompt."""

from __future__ import annotations

from pathlib import Path

import yaml

from headwater.data.sampler import ShufflingSampler
from headwater.observe.run_directory import RunDirectory


def ledger(run: Path) -> list[dict]:
    """One record per step, as the run stands."""
    return [each for each in RunDirectory(run).read_ledger() if each["kind"] == "step"]


def outcomes(run: Path) -> list[dict]:
    """The ledger of an exact run without what depends on time: at which second a step ended, and which of the groups
    that wait for a later step had finished then."""
    lines = []
    for line in ledger(run):
        counts = dict(line["counts"])
        counts["ahead"] = counts.pop("buffered") + counts.pop("in_flight")
        lines.append({**line, "counts": counts, "time": 0.0})
    return lines


def check_books(run: Path, num_steps: int) -> None:
    """Every line balances, and every dispatch ended once. The prompts are those of the data, in the order of the
    sampler: none is missing, and none was drawn twice in an epoch."""
    config = yaml.safe_load(RunDirectory(run).config_file.read_text())
    num_prompts, lines = config["trainer"]["num_prompts_per_step"], ledger(run)
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    for line in lines:
        counts = line["counts"]
        assert counts["dispatched"] == sum(counts[key] for key in ("trained", "dropped", "buffered", "in_flight"))
        assert counts["trained"] == num_prompts * line["step"]
        assert len(line["trained"]) == num_prompts
    ends = sorted(
        (each for line in lines for each in (*line["trained"], *line["dropped"])), key=lambda each: each["id"]
    )
    assert [each["id"] for each in ends] == list(range(lines[-1]["counts"]["dispatched"]))
    drawn = ShufflingSampler(config["data"]["num_train_rows"], config["run"]["seed"]).take(len(ends))
    assert [(each["index"], each["epoch"]) for each in ends] == [(each.index, each.epoch) for each in drawn]
