"""Train recipes as a user would, several at a time, and compare the held-out reward before and after.

    python benchmarks/recipes.py smollm2-arithmetic smollm2-arithmetic+ppo --seeds 0 1 2 --plot docs/images/recipes.png
    python benchmarks/recipes.py quickstart --settings trainer.total_steps=20

A case is a recipe, or several joined by ``+``; later ones change earlier ones. ``name=recipe+recipe;key=value`` gives
it a name and settings of its own. ``--settings`` are for all of them. ``--add`` completes the table with the runs of an
earlier record, except those that were made again. Every run is a process of ``headwater train``. A run that fails, or
is stopped by ``--limit``, is shown with its last words and is in the record with the rewards that it reached. The
record is written after every run, so a series that is stopped keeps those that have ended.

``--at-s 60 120`` compares the runs at equal times: the held-out reward after so many seconds of training, interpolated
between evaluations. ``--by-time`` draws the rewards over these seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from options import parser_of
from record import write_record


@dataclass(frozen=True)
class Case:
    name: str
    recipes: tuple[str, ...]
    settings: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Case:
        """``recipe+recipe`` or ``name=recipe+recipe;key=value;key=value``."""
        first, *settings = text.split(";")
        name, _, recipes = first.rpartition("=")
        return cls(name or recipes, tuple(recipes.split("+")), tuple(settings))


@dataclass(frozen=True)
class Run:
    case: str
    seed: int
    command: str
    rewards: tuple[tuple[int, float, float], ...] = ()
    """Step, held-out reward, seconds of training until then. Step 0 is after the supervised start, if there is one."""
    train_rewards: tuple[float, ...] = ()
    step_seconds: float = 0.0
    """Median over all steps but the first."""
    train_seconds: float = 0.0
    """All steps together."""
    wall_seconds: float = 0.0
    """The whole command, with loading and evaluation."""
    error: str = field(default="")


def run_case(case: Case, seed: int, common: Sequence[str], limit_s: float) -> Run:
    with TemporaryDirectory() as root:
        settings = [f"run.seed={seed}", "run.name=it", *case.settings, *common]
        shown = " ".join(["headwater train", *case.recipes, *settings])
        command = [sys.executable, "-m", "headwater", "train", *case.recipes, *settings, f"run.root={root}"]
        begun = time.monotonic()
        problem = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            if done.returncode:
                problem = (done.stderr + done.stdout)[-1500:]
        except subprocess.TimeoutExpired:
            problem = f"stopped after {limit_s:.0f} s"
        wall = time.monotonic() - begun
        metrics = Path(root) / "it" / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [each for each in records if each["kind"] == "train"]
    rewards = {each["step"]: each["reward/mean"] for each in records if each["kind"] == "eval"}
    seconds = {step: sum(each["time/step_s"] for each in steps if each["step"] <= step) for step in rewards}
    return Run(
        case.name,
        seed,
        shown,
        rewards=tuple((step, reward, round(seconds[step], 1)) for step, reward in rewards.items()),
        train_rewards=tuple(round(each["reward/mean"], 4) for each in steps),
        step_seconds=statistics.median(each["time/step_s"] for each in steps[1:]) if len(steps) > 1 else 0.0,
        train_seconds=sum(each["time/step_s"] for each in steps),
        wall_seconds=wall,
        error=problem,
    )


def run_all(jobs: Sequence[tuple[Case, int]], common: Sequence[str], num: int, limit_s: float) -> Iterator[Run]:
    ends = time.monotonic() + limit_s
    with ThreadPoolExecutor(num) as pool:
        futures = [
            pool.submit(lambda job: run_case(*job, common, max(1.0, ends - time.monotonic())), job) for job in jobs
        ]
        for future in as_completed(futures):
            yield future.result()


def earlier_runs(record: Path, runs: Sequence[Run]) -> list[Run]:
    """The runs of an earlier record, without those that were made again."""
    done = {(each.case, each.seed) for each in runs}
    found = [Run(**each) for each in json.loads(record.read_text())["runs"]]
    return [each for each in found if (each.case, each.seed) not in done]


def reward_at(run: Run, seconds: float) -> float | None:
    """The held-out reward after ``seconds`` of training, between two evaluations on the line between them.

    A run that completed all its steps earlier keeps its last reward; one that was stopped earlier has none.
    """
    for (_, before, begin), (_, after, end) in pairwise(run.rewards):
        if begin <= seconds <= end:
            return before + (after - before) * (seconds - begin) / (end - begin) if end > begin else after
    return run.rewards[-1][1] if run.rewards and not run.error else None


def rows_at(runs: Sequence[Run], times: Sequence[float]) -> list[dict[str, Any]]:
    """One row per case and time: the mean over its seeds, and each of them."""
    rows = []
    for case in dict.fromkeys(each.case for each in runs):
        for seconds in times:
            found = [reward_at(each, seconds) for each in runs if each.case == case]
            rewards = [each for each in found if each is not None]
            if rewards:
                mean = statistics.fmean(rewards)
                rows.append({"case": case, "at_s": seconds, "reward": mean, "reward_per_seed": rewards})
    return rows


def rows_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    rows = []
    for case in dict.fromkeys(each.case for each in runs):
        found = sorted(
            (each for each in runs if each.case == case and len(each.rewards) > 1), key=lambda each: each.seed
        )
        if not found:
            continue
        before, after = [each.rewards[0][1] for each in found], [each.rewards[-1][1] for each in found]
        rows.append(
            {
                "case": case,
                "seeds": [each.seed for each in found],
                "before": statistics.fmean(before),
                "after": statistics.fmean(after),
                "after_per_seed": after,
                "best": statistics.fmean(max(reward for _, reward, _ in each.rewards) for each in found),
                "steps": found[0].rewards[-1][0],
                "step_s": statistics.fmean(each.step_seconds for each in found),
                "train_s": statistics.fmean(each.train_seconds for each in found),
                "wall_s": statistics.fmean(each.wall_seconds for each in found),
            }
        )
    return rows


def draw(path: Path, runs: Sequence[Run], *, by_time: bool = False) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, case in enumerate(dict.fromkeys(each.case for each in runs)):
        for number, each in enumerate(one for one in runs if one.case == case and one.rewards):
            steps, rewards, seconds = zip(*each.rewards, strict=True)
            style, label = ("o-", "s--")[place // 10 % 2], None if number else case
            axes.plot(
                seconds if by_time else steps, rewards, style, color=f"C{place}", markersize=3, alpha=0.8, label=label
            )
    axes.set(xlabel="seconds of training" if by_time else "step", ylabel="held-out reward", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="+", metavar="CASE", help="recipe+recipe or name=recipe+recipe;key=value;...")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all together (default 3600)")
    parser.add_argument("--settings", nargs="*", default=[], metavar="key=value", help="for all runs")
    parser.add_argument("--add", type=Path, metavar="RECORD", help="add the other runs of an earlier record")
    parser.add_argument("--plot", type=Path, help="draw the held-out rewards here, as a PNG")
    parser.add_argument("--by-time", action="store_true", help="draw them over the seconds of training")
    parser.add_argument("--at-s", type=float, nargs="*", default=[], metavar="S", help="compare the rewards then")
    options: argparse.Namespace = parser.parse_args()
    load = os.getloadavg()[0]
    jobs = [(Case.read(text), seed) for seed in options.seeds for text in options.cases]
    order = {Case.read(text).name: place for place, text in enumerate(options.cases)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def write(runs: Sequence[Run]) -> list[Run]:
        """Write the record, and return all runs that are in it."""
        found = [*runs, *([] if options.add is None else earlier_runs(options.add, runs))]
        found.sort(key=lambda each: (order.get(each.case, len(order)), each.case, each.seed))
        shared = {"load_before": load, "at_a_time": options.processes}
        rows = {"rows": rows_of(found), "at_times": rows_at(found, options.at_s)}
        write_record(options.out, device, **shared, **rows, runs=[asdict(each) for each in found])
        return found

    runs: list[Run] = []
    for run in run_all(jobs, options.settings, options.processes, options.limit):
        runs.append(run)
        curve = " ".join(f"{step}:{reward:.3f}" for step, reward, _ in run.rewards)
        print(
            f"{run.case} seed {run.seed}  {run.wall_seconds:.0f} s, step {run.step_seconds:.2f} s  {curve}", flush=True
        )
        if run.error:
            print(f"  failed: {run.error}", flush=True)
        write(runs)
    found = write(runs)
    print(f"\n{'case':<36} {'before':>6} {'after':>6} {'best':>6} {'steps':>5} {'s/step':>6} {'wall s':>6}")
    for row in rows_of(found):
        print(
            f"{row['case']:<36} {row['before']:>6.3f} {row['after']:>6.3f} {row['best']:>6.3f} {row['steps']:>5} "
            f"{row['step_s']:>6.2f} {row['wall_s']:>6.0f}"
        )
    for row in rows_at(found, options.at_s):
        seeds = " ".join(f"{reward:.3f}" for reward in row["reward_per_seed"])
        print(f"{row['case']:<36} after {row['at_s']:>4.0f} s: {row['reward']:.3f} ({seeds})")
    if options.plot is not None:
        draw(options.plot, found, by_time=options.by_time)


if __name__ == "__main__":
    main()
