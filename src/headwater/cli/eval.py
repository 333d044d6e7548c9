"""``headwater eval``: the mean reward of a run's model on held-out prompts."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from headwater.observe.run_directory import RunDirectory
    from headwater.trainer.evaluate import Evaluation

HELP = "Show the mean reward of a run's model on held-out prompts, and the reward before training."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory, for example runs/quickstart")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, for example eval.num_prompts=1000")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to evaluate; default the latest")
    parser.add_argument("--show", type=int, metavar="K", default=0, help="print the first K responses")


def run(args: argparse.Namespace) -> int:
    import torch

    from headwater.config.load import load_config
    from headwater.core.errors import HeadwaterError, RunError
    from headwater.observe.progress import lasting_console
    from headwater.observe.run_directory import RunDirectory
    from headwater.trainer.checkpoint import Checkpoints, check_whole, step_of
    from headwater.trainer.evaluate import evaluate
    from headwater.trainer.rollout_setup import build_rollout

    if args.show < 0:
        raise HeadwaterError(f"--show = {args.show}: must be >= 0; 0 prints no responses")
    run = RunDirectory.open(args.run)
    # The eval settings are used even if the run itself did not evaluate.
    config = load_config(run.config_file, [*args.overrides, "eval.after=true"]).config
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    checkpoints = Checkpoints(run.checkpoints, config.trainer.keep_checkpoints)
    checkpoint = checkpoints.latest() if args.step is None else checkpoints.at(args.step)
    if checkpoint is None:
        raise RunError(f"{run.path}: no checkpoint yet; wait for one, let the run finish, or stop it with Ctrl-C")
    check_whole(run, checkpoint, part="model")
    parts = build_rollout(config, str(checkpoint / "model"))
    try:
        if parts.eval_data is None:
            raise RunError(f"{run.path}: no held-out prompts; name some, for example data.eval=test.parquet")
        console = lasting_console()
        with console.status("evaluating"):
            result = evaluate(parts.eval_rollouts, parts.eval_data, config.eval.num_prompts, config.run.seed)
    finally:
        parts.close()
    step = step_of(checkpoint)
    _print(console, run, step, result, args.show)
    report = run.free_file("eval", f"report_{step:06d}", ".json")
    report.write_text(json.dumps({"step": step, "time": time.time(), **result.metrics()}, indent=1), encoding="utf-8")
    console.print(f"Report  {report}", highlight=False, soft_wrap=True)
    return 0


def _print(console: Console, run: RunDirectory, step: int, result: Evaluation, num_shown: int) -> None:
    from rich.table import Table

    table = Table(title=f"Held-out prompts, {run.path.name}", title_justify="left")
    for column in ("step", "mean reward", "prompts", "response length", "stopped"):
        table.add_column(column, justify="right")
    before = next((each for each in run.read_metrics() if each["kind"] == "eval" and each["step"] == 0), None)
    if before is not None and step > 0:
        table.add_row(*_row("0 (in training)", before))
    table.add_row(*_row(str(step), result.metrics()))
    console.print(table)
    if result.num_dropped:
        console.print(f"[red]{result.num_dropped} prompts have no result[/] (rejected or failed)")
    for prompt, trajectory in result.rollouts[:num_shown]:
        console.print(f"[bold]{prompt.uid}[/]  reward {trajectory.reward:g}", highlight=False)
        console.print(
            f"  prompt    {prompt.text!r}\n  response  {trajectory.info.get('response_text', '')!r}", markup=False
        )


def _row(step: str, metrics: dict[str, float]) -> list[str]:
    return [
        step,
        f"{metrics['reward/mean']:.3f}",
        f"{metrics['num_prompts']:.0f}",
        f"{metrics['response_length/mean']:.1f}",
        f"{100 * metrics['stopped_fraction']:.0f}%",
    ]
