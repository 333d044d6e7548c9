"""The summary at the end of a run: results, where the time was spent, and what to try next or how to resume."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from headwater.core.registry import PYTHON
from headwater.observe.progress import Display
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.metrics import DROP_METRICS, FAILED_CALLS

_Record = dict[str, Any]
_SMOOTHING = 0.8
_FAILURES = "reward/failures/"
"""The metrics of failed scoring calls, followed by their cause."""
_LEARNER = {
    "wait for rollouts": "wait",
    "experience": "experience",
    "train": "train",
    "publish": "publish",
    "record": "record",
    "evaluation": "evaluate",
    "checkpoint": "checkpoint",
}
"""The parts of a step: the label in the summary, and the name in the metrics."""
_OF_A_STEP = (
    "reward/mean", "response_length/mean", "time/step_s", "groups/dropped", "groups/informative_fraction",
    "stopped_fraction",
)  # fmt: skip


def summarise(run: RunDirectory, display: Display, *, is_finished: bool = True) -> None:
    """Draw the reward curve and print the summary. Both use only the run directory."""
    records = run.read_metrics()
    train = [record for record in records if record["kind"] == "train" and _has_numbers(record, _OF_A_STEP)]
    evaluations = [record for record in records if record["kind"] == "eval" and _has_numbers(record, ("reward/mean",))]
    draw_reward_curve(run.curve_file, _points(train), _points(evaluations), f"Reward of {run.path.name}")
    if train:
        display.console.print(_table(train, evaluations))
    display.say(f"Reward curve   {run.curve_file}")
    display.say(f"Run directory  {run.path}")
    for line in suggestions(run, train, evaluations) if is_finished else hints(train):
        display.say(f"  → {line}")
    if not is_finished:
        display.say(how_to_resume(run))


def _has_numbers(record: _Record, names: Sequence[str]) -> bool:
    """Whether a record has what the summary shows. A line that something else wrote into the file may not."""
    return all(isinstance(record.get(name), (int, float)) for name in names)


def how_to_resume(run: RunDirectory, total_steps: int | None = None) -> str:
    """For an interrupted run. With ``total_steps``, say so if all steps were already done."""
    steps = run.checkpoint_steps()
    if not steps:
        return f"Interrupted before the first checkpoint. Start again with:  {resume_command(run)}"
    if total_steps is not None and steps[-1] >= total_steps:
        return f"Interrupted; all {total_steps} steps are done and saved in {run.path}"
    return f"Interrupted; everything up to step {steps[-1]} is saved. Resume with:  {resume_command(run)}"


def what_is_kept(run: RunDirectory) -> str:
    """For a run that an error has ended; empty if it has no checkpoint."""
    if not (steps := run.checkpoint_steps()):
        return ""
    return f"Everything up to step {steps[-1]} is saved. When the error is fixed, resume with:  {resume_command(run)}"


def resume_command(run: RunDirectory) -> str:
    """The command, or what to call in Python for a run that commands cannot resume."""
    if needs_its_script(run):
        return f'train(..., resume="{run.path}") in Python, with the same data and functions'
    return f"headwater train --resume {run.path}"


def _points(records: Sequence[_Record]) -> list[tuple[int, float]]:
    return [(record["step"], record["reward/mean"]) for record in records]


def _table(train: Sequence[_Record], evaluations: Sequence[_Record]) -> Table:
    table = Table(title="Summary", title_justify="left", show_header=False)
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        before = f"{first['reward/mean']:.3f} → " if len(evaluations) > 1 else ""
        when = "" if before else f" (only step {last['step']} was evaluated)"
        table.add_row("held-out reward", f"{before}[bold]{last['reward/mean']:.3f}[/]{when}")
    for label, name, form in (
        ("training reward", "reward/mean", ".3f"),
        ("response length", "response_length/mean", ".1f"),
    ):
        ends = [train[0][name], train[-1][name]] if len(train) > 1 else [train[0][name]]
        text = " → ".join(format(value, form) for value in ends)
        table.add_row(label, f"{text} tokens" if "length" in name else text)
    total_s = sum(record["time/step_s"] for record in train)
    table.add_row("steps", f"{len(train)} in {total_s:.0f} s, {total_s / len(train):.2f} s each")

    def share(name: str) -> str:
        return f"{100 * sum(record.get(f'time/{name}_s', 0.0) for record in train) / total_s:.0f}%"

    # These parts of a step run one after the other. Rollouts run concurrently, so their shares do not add up with them.
    for label, name in _LEARNER.items():
        if any(f"time/{name}_s" in record for record in train):
            table.add_row(f"  {label}", share(name))
    table.add_row("rollouts (concurrent)", f"generate {share('generate')}, reward {share('reward')}")
    for label, text in _losses(train, evaluations):
        table.add_row(label, text)
    return table


def _losses(train: Sequence[_Record], evaluations: Sequence[_Record]) -> Iterator[tuple[str, str]]:
    """What was not trained on or not evaluated, by kind."""

    def total(name: str) -> int:
        return int(sum(record.get(name, 0) for record in train))

    counts = {kind: total(name) for kind, name in DROP_METRICS.items()}
    if kinds := ", ".join(f"{count} {kind.value}" for kind, count in counts.items() if count):
        is_bad = any(count for kind, count in counts.items() if kind.is_failure)
        yield "[red]dropped groups[/]" if is_bad else "dropped groups", f"{sum(counts.values())} ({kinds})"
    if failed := total(FAILED_CALLS):
        names = sorted({name for record in train for name in record if name.startswith(_FAILURES)})
        causes = ", ".join(f"{total(name)} {name.removeprefix(_FAILURES)}" for name in names if total(name))
        yield "[red]failed scoring calls[/]", f"{failed} ({causes})"
    if lost := total("groups/lost_samples"):
        yield "[red]lost samples[/]", f"{lost}"
    if left_out := round(train[-1].get("prompts/left_out", 0)):
        yield "prompts left out", f"{left_out} over data.max_prompt_tokens"
    if unscored := round(sum(record.get("num_dropped", 0) for record in evaluations)):
        yield "[red]held-out prompts without a result[/]", f"{unscored} in {len(evaluations)} evaluations"


def suggestions(run: RunDirectory, train: Sequence[_Record], evaluations: Sequence[_Record]) -> list[str]:
    """Advice about a complete run, derived from its metrics; at least one line."""
    lines = hints(train)
    if train:
        informative, reward = _at_the_end(train, "groups/informative_fraction"), _at_the_end(train, "reward/mean")
        is_decided = informative < 0.2 and not 0.1 <= reward <= 0.8
        if not is_decided and reward - train[0]["reward/mean"] < 0.05:
            lines.append("Reward barely moved: try a higher learner.learning_rate or more trainer.total_steps.")
    if not evaluations:
        lines.append("No held-out prompts were evaluated: see data.eval and the eval settings.")
    lines.append(f"Open it in a browser: headwater ui {run.path}")
    if evaluations and not needs_its_script(run):
        lines.append(f"Look at responses: headwater eval {run.path} --show 5")
    else:
        lines.append(f"Look at responses: the Parquet files in {run.path / 'rollouts'}")
    return lines


def needs_its_script(run: RunDirectory) -> bool:
    """Whether its data or functions are objects of a Python program, which commands do not have."""
    with suppress(OSError):
        return re.search(rf"\b{re.escape(PYTHON)}[\w<]", run.config_file.read_text(encoding="utf-8")) is not None
    return False


def hints(train: Sequence[_Record]) -> list[str]:
    """Advice that also applies to an incomplete run: more steps would not change it."""
    if not train:
        return []
    lines = []
    reward, informative = _at_the_end(train, "reward/mean"), _at_the_end(train, "groups/informative_fraction")
    if _at_the_end(train, "stopped_fraction") < 0.5:
        lines.append("Most responses hit a length limit: raise rollout.max_new_tokens, or that of a turn.")
    if informative < 0.2 and reward < 0.1:
        lines.append("Nearly every group got the same low reward: try an easier task, a better model or a warm_start.")
    elif informative < 0.2 and reward > 0.8:
        lines.append("Most groups already get full reward: try harder prompts (for a task: data.task_args).")
    return lines


def _at_the_end(train: Sequence[_Record], name: str) -> float:
    """The mean over the last fifth of the steps."""
    tail = train[-max(1, len(train) // 5) :]
    return float(sum(record[name] for record in tail) / len(tail))


def draw_reward_curve(
    path: Path,
    train: Sequence[tuple[int, float]],
    evaluation: Sequence[tuple[int, float]],
    title: str,
) -> None:
    """Plot the mean reward per training step, raw and smoothed, and the evaluations. Points are (step, reward)."""
    # The figure classes are used directly, because pyplot keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, rewards = zip(*train, strict=True)
        axes.plot(steps, rewards, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(rewards), color="tab:blue", linewidth=2, label="training prompts (smoothed)")
    if evaluation:
        steps, rewards = zip(*evaluation, strict=True)
        axes.plot(steps, rewards, "o-", color="tab:orange", linewidth=1.5, label="held-out prompts")
        for step, reward in (evaluation[0], evaluation[-1]):
            axes.annotate(f"{reward:.2f}", (step, reward), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.margins(y=0.12)
    if train or evaluation:
        axes.legend(loc="best")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential average with bias correction."""
    smoothed: list[float] = []
    average = weight = 0.0
    for value in values:
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append(average / weight)
    return smoothed
