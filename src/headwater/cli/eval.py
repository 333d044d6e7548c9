"""``headwater eval``: the mean reward of a run's model, or of any model, on held-out prompts."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import HeadwaterError, RunError

if TYPE_CHECKING:
    from headwater.config.schema import Config
    from headwater.core.protocols import InferenceEngine
    from headwater.core.records import Trajectory
    from headwater.observe.progress import Display
    from headwater.observe.run_directory import RunDirectory
    from headwater.trainer.evaluate import Evaluation, Rollouts

HELP = (
    "Show the mean reward of a model on held-out prompts. For a run, its own task and latest checkpoint are used, and "
    "the reward before training is shown beside it. For any other model, a recipe or --data names the task."
)
EXAMPLES = """\
examples:
  headwater eval runs/quickstart --show 5                    a run, and some responses
  headwater eval tiny:qwen3 quickstart                       a model on the task of a recipe
  headwater eval models/mine --data test.jsonl --reward reward.py:compute_score
  headwater eval smollm2 smollm2-arithmetic --out results/smollm2     keep the metrics and the responses"""


@dataclass(frozen=True)
class Subject:
    """What is evaluated."""

    name: str
    config: Config
    model_path: str
    run: RunDirectory | None = None
    step: int = 0
    """The checkpoint of the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headwater eval RUN|MODEL [RECIPE ...] [key=value ...] [--data SOURCE] [--reward FUNCTION] [options]"
    parser.epilog = EXAMPLES
    parser.add_argument(
        "target",
        metavar="RUN|MODEL",
        help="run directory, URL of its copy (trainer.checkpoint_dir), model folder, hub id, tiny:<preset> or smollm2",
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE, key=value",
        help="for a model: the recipe of its task; settings, for example eval.num_prompts=1000",
    )
    parser.add_argument("--data", metavar="SOURCE", help="held-out prompts: a file or a task; sets data.eval")
    parser.add_argument(
        "--reward", metavar="FUNCTION", help="scoring function, such as reward.py:compute_score; sets reward.function"
    )
    parser.add_argument(
        "--step",
        default="",
        metavar="N|best",
        help="for a run: checkpoint to evaluate; best is the one with the best trainer.best_metric, or "
        "eval/reward/mean if that is empty; default the latest",
    )
    parser.add_argument("--show", type=int, metavar="K", default=0, help="print the first K responses")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="new folder for report.json, with all metrics, and the responses as Parquet files",
    )


def run(args: argparse.Namespace) -> int:
    if args.show < 0:
        raise HeadwaterError(f"--show = {args.show}: must be >= 0; 0 prints no responses")
    out = args.out.expanduser() if args.out is not None else None
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HeadwaterError(f"--out {out}: exists and is not empty; name a new folder")
    if "://" in args.target:
        from headwater.trainer.mirror import local_run

        args.target = str(local_run(args.target, key="RUN|MODEL", step=args.step))
    subject = _of_run(args) if (Path(args.target).expanduser() / "config.yaml").is_file() else _of_model(args)
    config = subject.config

    import torch

    from headwater.config.builtin import split_arguments
    from headwater.config.notices import eval_notices
    from headwater.observe.progress import Display
    from headwater.trainer.evaluate import evaluate, rows_of
    from headwater.trainer.rollout_setup import build_rollout

    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    parts = build_rollout(config, subject.model_path)
    try:
        if parts.engine.status().needs_weights:
            _give_weights(parts.engine, subject.model_path, config.run.seed)
        if parts.eval_data is None:
            raise RunError(f"{subject.name}: no held-out prompts; name some, for example --data test.parquet")
        display = Display()
        for notice in eval_notices(split_arguments(args.arguments)[1]):
            display.say(f"Note: {notice}")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        num_prompts = len(rows_of(parts.eval_data, config.eval.num_prompts))
        with display.stage("evaluate", num_prompts) as reporter:
            result = evaluate(
                parts.eval_rollouts.rollout_batch,
                parts.eval_data,
                config.eval.num_prompts,
                config.run.seed,
                batch_size=config.eval.batch_size,
                save=lambda number, rollouts: _save(out, subject.step, number, rollouts),
                progress=lambda num_done: reporter.update(num_done, {}),
            )
    finally:
        parts.close()
    _print(display, subject, result, args.show)
    _write_reports(display, subject, result, out)
    return 0


def _save(out: Path | None, step: int, number: int, rollouts: Rollouts) -> None:
    """Write the responses of a batch. Batches after the first have a number in their names."""
    if out is None:
        return
    from headwater.observe.media_store import MediaStore
    from headwater.trainer.tables import write_rollouts

    part = f"_part_{number + 1:03d}" if number else ""
    write_rollouts(out / f"responses{part}.parquet", step, rollouts, store=MediaStore(out / "media"))


def _give_weights(engine: InferenceEngine, model_path: str, seed: int) -> None:
    """Servers that the command line names serve any weights until they get those of the model."""
    from headwater.core.protocols import WeightUpdate
    from headwater.core.waits import ENGINE_CALL_LIMIT_S, wait_for_future
    from headwater.models.load import load_model

    model = load_model(model_path, dtype=engine.capabilities.dtype, device="cpu", seed=seed)
    update = WeightUpdate.of(0, [(name, value.detach()) for name, value in model.named_parameters()])
    what = f"the servers take the weights of {model_path}"
    wait_for_future(engine.update_weights(update), lambda: what, kind="weights", hard_limit_s=ENGINE_CALL_LIMIT_S)


def _of_run(args: argparse.Namespace) -> Subject:
    from headwater.config.builtin import split_arguments
    from headwater.config.load import load_config
    from headwater.observe.run_directory import RunDirectory
    from headwater.trainer.checkpoint import check_whole, find_checkpoint, step_of

    recipes, overrides = split_arguments(args.arguments)
    if recipes:
        raise HeadwaterError(
            f"{args.target} with the recipe {recipes[0]}: a run uses its own recipe; give settings to change as "
            "key=value, or evaluate a model: checkpoints/step_N/model in the run"
        )
    run = RunDirectory.open(Path(args.target).expanduser())
    config = load_config(run.config_file, [*_without_servers(run.config_file), *overrides, *_settings(args)]).config
    checkpoint = find_checkpoint(run, config.trainer, args.step)
    check_whole(run, checkpoint, part="model")
    return Subject(run.path.name, config, str(checkpoint / "model"), run, step_of(checkpoint))


def _without_servers(recipe: Path) -> list[str]:
    """Settings for an engine in this process: the servers of a run serve the weights that it is training."""
    from headwater.config.load import load_config

    if not load_config(recipe, was_accepted=True).config.rollout.servers:
        return []
    own = ("servers=[]", "backend=embedded", "placement=colocated", "weight_transfer=auto", "weight_folder=''")
    return [f"rollout.{each}" for each in own]


def _of_model(args: argparse.Namespace) -> Subject:
    from headwater.config.builtin import split_arguments
    from headwater.config.load import load_config
    from headwater.models.source import check_model

    if args.step:
        raise HeadwaterError(f"--step = {args.step}: goes with a run directory, and {args.target} is none")
    path = _model_path(args.target)
    check_model(path, "RUN|MODEL")
    recipes, overrides = split_arguments(args.arguments)
    loaded = load_config(recipes, [*overrides, *_settings(args), f"model.path={json.dumps(path)}"])
    if not {"data.train", "data.eval"} & loaded.given:
        raise HeadwaterError(
            f"{args.target}: say on what to evaluate it: name a recipe (headwater eval {args.target} quickstart), or "
            "give --data FILE and --reward FUNCTION"
        )
    return Subject(args.target, loaded.config, path)


def _model_path(target: str) -> str:
    """The model folder of a checkpoint, or ``target`` itself."""
    from headwater.observe.run_directory import which_run

    folder = Path(target).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return target
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    missing = "not a run directory (config.yaml is missing) and not a model (config.json is missing)"
    raise RunError(f"{target}: {missing}; {which_run(folder)}")


def _settings(args: argparse.Namespace) -> list[str]:
    """The settings that the options stand for. The eval settings are used even if a run itself did not evaluate."""
    settings = ["eval.after=true"]
    if args.data is not None:
        settings.append(f"data.eval={json.dumps([args.data])}")
    if args.reward is not None:
        settings.append(f"reward.function={json.dumps(args.reward)}")
    return settings


def _print(display: Display, subject: Subject, result: Evaluation, num_shown: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = display.console
    table = Table(title=f"Held-out prompts, {escape(subject.name)}", title_justify="left")
    for column in ("model" if subject.run is None else "step", "mean reward", "prompts", "response length", "stopped"):
        table.add_column(column, justify="right")
    records = subject.run.read_metrics() if subject.run is not None else []
    before = next((each for each in records if each["kind"] == "eval" and each["step"] == 0), None)
    if before is not None and subject.step > 0:
        table.add_row(*_row("0 (in training)", before))
    name = escape(Path(subject.name).name) if subject.run is None else str(subject.step)
    table.add_row(*_row(name, result.metrics()))
    console.print(table)
    _print_samples(display, result)
    if result.num_dropped:
        console.print(f"[red]{result.num_dropped} prompts have no result[/] (rejected or failed)")
    for prompt, trajectory in result.rollouts[:num_shown]:
        console.print(f"[bold]{escape(prompt.uid)}[/]  reward {trajectory.reward:g}", highlight=False)
        console.print(f"  prompt    {prompt.text!r}\n  response  {_shown(trajectory)}", markup=False)


def _print_samples(display: Display, result: Evaluation) -> None:
    """Per data source: the mean, and the statistics over the samples of a prompt."""
    from rich.markup import escape
    from rich.table import Table

    metrics, sources = result.metrics(), result.sources
    statistics = [name.removeprefix("reward/") for name in metrics if "@" in name and name.count("/") == 1]
    if not statistics and len(sources) < 2:
        return
    table = Table(title="By data source", title_justify="left")
    for column in ("reward", "all", *sources):
        table.add_column(escape(column), justify="left" if column == "reward" else "right")
    for name in ("mean", *statistics):
        values = [metrics.get("/".join(part for part in ("reward", source, name) if part)) for source in ("", *sources)]
        table.add_row(name, *("" if value is None else f"{value:.3f}" for value in values))
    display.console.print(table)


def _shown(trajectory: Trajectory) -> str:
    """The model's reply. A conversation is shown with all its messages, in separate lines."""
    from headwater.trainer.tables import response_text

    text = response_text(trajectory)
    if text == trajectory.info.get("response_text", ""):
        return repr(text)
    lines = ("".join(each if each.isprintable() else repr(each)[1:-1] for each in line) for line in text.split("\n"))
    return "".join(f"\n    {line}".rstrip() if line else "" for line in lines)


def _write_reports(display: Display, subject: Subject, result: Evaluation, out: Path | None) -> None:
    """The metrics as JSON: in the run directory, if it is a run, and in ``out``, with what was evaluated and how."""
    from dataclasses import asdict

    from headwater.data.load import sources_of

    values = {"step": subject.step, "time": time.time(), **result.metrics()}
    config = subject.config
    reports: dict[Path, dict[str, Any]] = {}
    if subject.run is not None:
        reports[subject.run.free_file("eval", f"report_{subject.step:06d}", ".json")] = values
    if out is not None:
        about = {"model": subject.model_path, "data": sources_of(config.data, "eval"), "seed": config.run.seed}
        reports[out / "report.json"] = {**about, "settings": asdict(config.eval), **values}
    for path, content in reports.items():
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        display.say(f"Report  {path}")


def _row(step: str, metrics: dict[str, float]) -> list[str]:
    return [
        step,
        f"{metrics['reward/mean']:.3f}",
        f"{metrics['num_prompts']:.0f}",
        f"{metrics['response_length/mean']:.1f}",
        f"{100 * metrics['stopped_fraction']:.0f}%",
    ]
