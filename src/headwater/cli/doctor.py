"""``headwater doctor``: whether a run is healthy, what it waits for, and what usually helps."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.core.errors import HeadwaterError

if TYPE_CHECKING:
    from rich.console import Console

    from headwater.observe.doctor import Diagnosis
    from headwater.sandbox.examination import Examination

HELP = (
    "Show whether a run is alive, how far it is, what it waits for, and what usually helps. Exit status 0: the run is "
    "healthy or finished; 1: something is wrong."
)
_NUM_LOG_LINES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="?", help="run directory, for example runs/quickstart")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare the checksum of every file of every checkpoint; without it, large ones are checked by size only",
    )
    parser.add_argument(
        "--sandbox",
        action="store_true",
        help="instead of a run: show what protects this machine from code that a model writes, by trying to break it",
    )


def run(args: argparse.Namespace) -> int:
    if args.sandbox:
        return _show_sandbox(as_json=args.json)
    if args.run is None:
        raise HeadwaterError("which run? Give its directory, for example: headwater doctor runs/quickstart")
    from headwater.observe.doctor import examine
    from headwater.observe.run_directory import RunDirectory

    diagnosis = examine(RunDirectory.open(args.run), verify=args.verify)
    if args.json:
        print(json.dumps(diagnosis.to_json(), indent=1))
    else:
        from headwater.cli.process import pipe_console

        _print(pipe_console(highlight=False, soft_wrap=True), diagnosis)
    return 0 if diagnosis.is_healthy else 1


def _show_sandbox(as_json: bool) -> int:
    """Exit status 0: an isolation works and every property holds."""
    from dataclasses import asdict

    from headwater.cli.process import pipe_console
    from headwater.config.rollout_schema import SandboxConfig
    from headwater.sandbox.examination import examine

    examination = examine(SandboxConfig())
    if as_json:
        print(json.dumps(asdict(examination) | {"is_safe": examination.is_safe}, indent=1))
    else:
        _print_examination(pipe_console(highlight=False, soft_wrap=True), examination)
    return 0 if examination.is_safe else 1


def _print_examination(console: Console, examination: Examination) -> None:
    from rich.markup import escape

    if examination.isolation:
        console.print(f"[bold]Code of a model is isolated by[/] [bold green]{examination.isolation}[/]")
    else:
        console.print(f"[bold red]No isolation:[/] {escape(examination.problem)}")
    for each in (*examination.kinds, *examination.properties):
        mark = "[green]✓[/]" if each.holds else "[red]✗[/]"
        is_told = each in examination.kinds or not each.holds
        console.print(f"  {mark} {escape(each.name)}{f': {escape(each.text)}' if is_told else ''}")
    if examination.isolation:
        console.print(f"A small program takes {examination.milliseconds:.1f} ms.")
    for remedy in examination.remedies:
        console.print(f"  [dim]{escape(remedy)}[/]")


def _print(console: Console, diagnosis: Diagnosis) -> None:
    """Print the state first, then the evidence, then the findings."""
    from rich.markup import escape

    colour = "green" if diagnosis.is_healthy else "red"
    console.print(f"[bold]{escape(diagnosis.run)}[/]  [bold {colour}]{diagnosis.life.state}[/]")
    for name, lines in _sections(diagnosis):
        for place, line in enumerate(lines):
            console.print(f"  [dim]{name if place == 0 else '':<11}[/] {escape(line)}")
    for each in diagnosis.findings:
        mark = "[red]✗[/]" if each.severity == "problem" else "[yellow]→[/]"
        console.print(f"{mark} {escape(each.what)}")
        if each.remedy:
            console.print(f"  [dim]{escape(each.remedy)}[/]")
    if not diagnosis.findings:
        compared = diagnosis.is_verified or not diagnosis.checkpoint_steps
        rest = "" if compared else "; the contents of the checkpoints were not compared (they are large): add --verify"
        console.print(f"[green]✓[/] no problems found{rest}")
    if diagnosis.resume:
        console.print(f"Resume with:  {escape(diagnosis.resume)}")


def _sections(diagnosis: Diagnosis) -> list[tuple[str, list[str]]]:
    return [
        ("life", [diagnosis.life.text]),
        ("progress", _progress(diagnosis)),
        ("servers", _servers(diagnosis)),
        ("ranks", _ranks(diagnosis)),
        ("waits", _waits(diagnosis)),
        ("groups", _groups(diagnosis)),
        ("ledger", _ledger(diagnosis)),
        ("checkpoints", [_checkpoints(diagnosis)]),
        ("error", diagnosis.error.splitlines()),
        ("log", [f"{_clock(each.time)} {each.level} {each.message}" for each in diagnosis.log[-_NUM_LOG_LINES:]]),
    ]


def _progress(diagnosis: Diagnosis) -> list[str]:
    from headwater.observe.evidence import show_duration

    total = f" of {diagnosis.total_steps}" if diagnosis.total_steps is not None else ""
    version = f", policy version {diagnosis.version}" if diagnosis.version is not None else ""
    ranks = f", {diagnosis.num_ranks} ranks" if diagnosis.num_ranks > 1 else ""
    if diagnosis.learner_failure:
        ranks += f"; the learner has failed: {diagnosis.learner_failure}"
    lines = [f"step {diagnosis.step}{total}{version}{ranks}"]
    if (stage := diagnosis.stage) is not None:
        lines.append(f"{stage.name}: step {stage.done} of at most {stage.total}, before training begins")
    if (last := diagnosis.last_metrics) is not None:
        reward = f", reward {last.reward_mean:.3f}" if last.reward_mean is not None else ""
        ago = f", {show_duration(last.seconds_ago)} ago" if last.seconds_ago is not None else ""
        lines.append(f"last metrics: {last.kind} {last.step}{reward}{ago}")
    if diagnosis.step_s is not None:
        before = f", earlier ones {show_duration(diagnosis.earlier_step_s)}" if diagnosis.earlier_step_s else ""
        lines.append(f"the last steps took {show_duration(diagnosis.step_s)} each{before}")
    return lines


def _servers(diagnosis: Diagnosis) -> list[str]:
    lines = []
    for each in diagnosis.servers:
        name = each.name if each.url in ("", each.name) else f"{each.name} at {each.url}"
        restarts = f", replaced {each.num_restarts} times" if each.num_restarts else ""
        load = f"{each.num_running} running, {each.num_waiting} waiting"
        lines.append(f"{name}: version {each.version}, {load}{restarts}; {each.state}")
    return lines


def _ranks(diagnosis: Diagnosis) -> list[str]:
    return [
        f"{each.rank}: {each.device} of {each.host}, process {each.pid}, peak {each.peak_memory_bytes / 2**30:.1f} GiB"
        f"{f', last call {each.last_call}' if each.last_call else ''}; {each.state}"
        for each in diagnosis.ranks
    ]


def _waits(diagnosis: Diagnosis) -> list[str]:
    from math import isinf

    from headwater.observe.evidence import show_duration

    return [
        f"{each.kind}, {show_duration(each.seconds)} of "
        f"{'no limit' if isinf(each.hard_limit_s) else show_duration(each.hard_limit_s)}: {each.description}"
        for each in diagnosis.waits
    ]


def _groups(diagnosis: Diagnosis) -> list[str]:
    from headwater.observe.evidence import show_duration

    runs = "ran" if diagnosis.life.is_over else "runs"
    lines = [
        f"{each.uid} (dispatch {each.id}) {runs} {show_duration(each.seconds)}: {each.doing}"
        for each in diagnosis.oldest_groups
    ]
    if diagnosis.episodes:
        counts = (f"{count} {stage.replace('_', ' ')}" for stage, count in diagnosis.episodes.items())
        lines.append(f"all episodes: {', '.join(counts)}")
    if diagnosis.capacity is not None:
        lines.append(f"{max(0, diagnosis.capacity)} more may start now")
    return lines


def _ledger(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.ledger is None:
        return []
    counts = diagnosis.ledger.counts
    parts = " + ".join(
        f"{counts[name]} {name.replace('_', ' ')}" for name in ("trained", "dropped", "buffered", "in_flight")
    )
    sign, verdict = ("=", "") if diagnosis.ledger.missing == 0 else ("≠", "  DOES NOT BALANCE")
    lines = [f"{counts['dispatched']} dispatched {sign} {parts}{verdict}"]
    if diagnosis.drops:
        lines.append("dropped: " + ", ".join(f"{count} {kind}" for kind, count in diagnosis.drops.items()))
    if diagnosis.num_left_out:
        lines.append(f"left out as longer than data.max_prompt_tokens: {diagnosis.num_left_out} training prompts")
    return lines


def _checkpoints(diagnosis: Diagnosis) -> str:
    if diagnosis.checkpoint_steps:
        damaged = diagnosis.damaged_steps
        steps = (f"{step} (damaged)" if step in damaged else str(step) for step in diagnosis.checkpoint_steps)
        only = "" if diagnosis.is_verified else "; only the sizes of the files were compared, --verify reads them"
        return "step " + ", ".join(steps) + only
    return "none: resuming would start again" if diagnosis.resume else "none yet"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
