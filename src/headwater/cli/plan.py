"""``headwater plan``: how to divide GPUs between training and generation, from a simulation."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.core.errors import HeadwaterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.table import Table

    from headwater.config.schema import Config
    from headwater.planner.plan import Candidate, CostModel, Plan
    from headwater.planner.simulate import Prediction
    from headwater.planner.workload import Lengths, Workload

HELP = (
    "Predict tokens/s, step time and staleness of a recipe on a number of GPUs, and the best division of the GPUs "
    "between the learner and inference servers. The scheduler of training runs on a virtual clock, with measured "
    "costs; nothing is trained."
)
EXAMPLES = """\
examples:
  headwater plan my.yaml --gpus 16                          with the costs of H200s
  headwater plan my.yaml --gpus 16 --model qwen2.5-32b      another model than the recipe's
  headwater plan my.yaml --gpus 16 --run runs/mine          response lengths of a finished run
  headwater plan quickstart --gpus 2 --measure              costs of this machine
  headwater plan my.yaml --gpus 16 --staleness 0,1,4 --json plan.json --plot plan.png

docs/planner.md says what is simulated, and how far predictions were from measurements."""
_WIDTH = 40
_PIPE_WIDTH = 110
_FOLDER = "rollout.weight_folder=/shared/weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headwater plan RECIPE [RECIPE ...] [key=value ...] --gpus N [options]"
    parser.epilog = EXAMPLES
    parser.add_argument(
        "arguments", nargs="*", metavar="RECIPE, key=value", help="the recipe to plan for, and settings to change"
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="how many GPUs there are")
    parser.add_argument("--gpu", default="h200", metavar="KIND", help="h200 (measured), h100 or a100 (scaled)")
    parser.add_argument("--model", metavar="NAME", help="plan for this model instead of the recipe's model.path")
    parser.add_argument(
        "--staleness", default="", metavar="LIST", help="values of rollout.max_staleness to compare (0,1,2,4,8)"
    )
    parser.add_argument("--mean-tokens", type=float, metavar="N", help="mean length of a response, if no run is given")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="mean length of a prompt, if no run is given")
    parser.add_argument(
        "--wait-s", type=float, default=0.0, metavar="S", help="what tools and rewards add to every episode, in seconds"
    )
    parser.add_argument("--costs", type=Path, metavar="FILE", help="take costs from this file; see --write-costs")
    parser.add_argument("--run", type=Path, metavar="DIR", help="take lengths from this run's rollouts")
    parser.add_argument(
        "--run-costs", action="store_true", help="with --run: take the costs, too, from the run's metrics"
    )
    parser.add_argument("--measure", action="store_true", help="measure costs and lengths with a short run here")
    parser.add_argument("--write-costs", type=Path, metavar="FILE", help="write the costs of the best split as JSON")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all predictions as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot of tokens/s by staleness as PNG")


def run(args: argparse.Namespace) -> int:
    from headwater.cli.process import pipe_console
    from headwater.config.builtin import split_arguments
    from headwater.config.load import load_config
    from headwater.planner.plan import make_plan

    _check(args)
    recipes, overrides = split_arguments(args.arguments)
    if not recipes:
        raise HeadwaterError("headwater plan: name a recipe, for example: headwater plan quickstart --gpus 2")
    config = load_config(recipes, overrides).config
    staleness = _numbers(args.staleness)
    model, lengths = _costs(args, config)
    workload = _workload(args, config, lengths)
    console = pipe_console()
    if not console.is_terminal:
        console = pipe_console(width=max(console.width, _PIPE_WIDTH))  # a pipe has no width
    with console.status("simulating") as status:
        plan = make_plan(
            workload,
            model,
            args.gpus,
            staleness=staleness,
            progress=lambda split, at: status.update(f"simulating {split}, max_staleness {at}"),
        )
    _print(console, plan, workload, recipes[0], config)
    if args.json is not None:
        args.json.write_text(json.dumps(plan.to_json(), indent=1) + "\n", encoding="utf-8")
        console.print(f"Predictions  {args.json}", markup=False, highlight=False, soft_wrap=True)
    if args.write_costs is not None:
        args.write_costs.write_text(model.costs(plan.best.split).to_json(), encoding="utf-8")
        console.print(f"Costs        {args.write_costs}", markup=False, highlight=False, soft_wrap=True)
    if args.plot is not None:
        _draw(args.plot, plan.by_staleness)
        console.print(f"Plot         {args.plot}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.gpus < 1:
        raise HeadwaterError(f"--gpus {args.gpus}: must be >= 1")
    given = [name for name, value in (("--costs", args.costs), ("--run-costs", args.run_costs),
                                      ("--measure", args.measure)) if value]  # fmt: skip
    if len(given) > 1:
        raise HeadwaterError(f"{' and '.join(given)}: give one source of costs")
    if args.run_costs and args.run is None:
        raise HeadwaterError("--run-costs: name the run with --run DIR")
    for name, value in (("--mean-tokens", args.mean_tokens), ("--prompt-tokens", args.prompt_tokens)):
        if value is not None and value < 1:
            raise HeadwaterError(f"{name} {value:g}: must be >= 1")
    if args.wait_s < 0:
        raise HeadwaterError(f"--wait-s {args.wait_s:g}: must be >= 0")


def _numbers(text: str) -> tuple[int, ...]:
    from headwater.planner.plan import DEFAULT_STALENESS

    try:
        numbers = tuple(int(each) for each in text.split(",")) if text else DEFAULT_STALENESS
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0:
        raise HeadwaterError(f"--staleness {text}: must be numbers >= 0, for example 0,1,4")
    return numbers


def _costs(args: argparse.Namespace, config: Config) -> tuple[CostModel, Lengths | None]:
    """What everything costs, and the response lengths if they were measured."""
    from headwater.config.server_checks import backend_traits
    from headwater.core.registry import nearest
    from headwater.planner.costs import Costs
    from headwater.planner.hardware import GPUS, Training, gpus_per_server, shape_of
    from headwater.planner.plan import Measured, Roofline
    from headwater.planner.workload import Lengths

    lengths = Lengths.of_run(args.run, config.rollout.num_samples_per_prompt) if args.run is not None else None
    if args.costs is not None:
        return Measured(Costs.read(args.costs)), lengths
    if args.measure:
        from headwater.planner.measure import measure

        with tempfile.TemporaryDirectory(prefix="headwater-plan-") as folder:
            measured, lengths_here = measure(config, Path(folder))
        return Measured(measured), lengths or lengths_here
    if args.run_costs:
        from headwater.config.load import load_config
        from headwater.observe.run_directory import RunDirectory
        from headwater.planner.measure import costs_of_run

        own = load_config(RunDirectory.open(args.run).config_file, []).config
        return Measured(costs_of_run(args.run, own)[0]), lengths
    if args.gpu not in GPUS:
        raise HeadwaterError(
            f"--gpu {args.gpu}: no costs are known; {nearest(args.gpu, sorted(GPUS))}, or use --measure"
        )
    mean = lengths.mean if lengths is not None else args.mean_tokens or 0.3 * config.rollout.max_new_tokens
    shape = shape_of(args.model or config.model.path, "--model" if args.model else "model.path")
    gpu = GPUS[args.gpu]
    used = _with_large_servers(config, gpus_per_server(shape, gpu))
    return (
        Roofline(
            shape,
            gpu,
            Training.of(config),
            context=(config.data.max_prompt_tokens + mean) / 2,
            max_sequences=config.engine.max_sequences,
            traits=backend_traits(used),
            weight_transfer=used.rollout.weight_transfer,
        ),
        lengths,
    )


def _with_large_servers(config: Config, num_server_gpus: int) -> Config:
    """The config with a backend whose servers can use ``num_server_gpus`` GPUs. ``headwater serve`` uses one."""
    from headwater.config.server_checks import backend_traits

    if num_server_gpus == 1 or backend_traits(config).is_foreign:
        return config
    used = replace(config, rollout=replace(config.rollout, backend="vllm"))
    if used.rollout.weight_transfer in ("auto", *backend_traits(used).transfers):
        return used
    return replace(used, rollout=replace(used.rollout, weight_transfer="auto"))


def _workload(args: argparse.Namespace, config: Config, lengths: Lengths | None) -> Workload:
    import numpy as np

    from headwater.planner.workload import Lengths, Workload

    rollout = config.rollout
    if lengths is None:
        lengths = Lengths.long_tailed(rollout.num_samples_per_prompt, rollout.max_new_tokens, mean=args.mean_tokens)
    return Workload(
        num_prompts=config.trainer.num_prompts_per_step,
        num_samples=rollout.num_samples_per_prompt,
        prompt_tokens=args.prompt_tokens or lengths.prompt_tokens or max(1, config.data.max_prompt_tokens // 2),
        lengths=lengths,
        max_staleness=rollout.max_staleness,
        max_concurrent=rollout.max_concurrent_groups,
        on_stale=rollout.on_stale,
        update_mode=config.engine.chosen_update_mode,
        waits_s=np.full((1, 1), args.wait_s),
        timeout_s=rollout.timeout_s,
        episode_timeout_s=rollout.episode_timeout_s,
        shares_prompts=config.learner.share_prompts,
        is_deterministic=config.engine.deterministic,
    )


def _print(console: Console, plan: Plan, workload: Workload, recipe: str, config: Config) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(f"{recipe}: {workload.num_prompts} prompts x {workload.num_samples} samples per step")
    say(f"Costs    {plan.source}")
    own, each = config.rollout.backend, plan.best.split.num_server_gpus
    if (used := _with_large_servers(config, each).rollout.backend) != own:
        say(f"Backend  {used}, because a server needs {each} GPUs, and a server of rollout.backend = {own} has one")
    say(f"Lengths  {workload.lengths.source}; mean {workload.lengths.mean:,.0f}; prompts {workload.prompt_tokens:,}")
    console.print(_table("Division of the GPUs (learner : servers)", plan.by_split))
    if plan.by_staleness:
        console.print(_table(f"rollout.max_staleness with {plan.by_staleness[0].split}", plan.by_staleness))
        _bars(say, plan.by_staleness)
    _recommend(say, plan, config)
    for note in plan.notes:
        say(f"Note: {note}.")


def _table(title: str, rows: Sequence[Candidate]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in ("GPUs", "staleness", "tokens/s", "step s", "wait", "servers busy", "lag", "too old", "events/s"):
        table.add_column(column, justify="right")
    for row in rows:
        predicted = row.prediction
        if predicted is None:
            table.add_row(str(row.split), str(row.max_staleness), Text(row.problem))
            continue
        table.add_row(
            str(row.split),
            str(row.max_staleness),
            f"{predicted.tokens_per_s:,.0f}",
            f"{predicted.step_s:,.2f}",
            f"{predicted.wait_s / predicted.step_s:.0%}",
            f"{predicted.server_busy:.0%}",
            f"{predicted.mean_lag:.1f}",
            f"{predicted.masked_share:.1%}",
            f"{predicted.events_per_s:,.0f}",
        )
    return table


def _bars(say: Callable[[str], None], rows: Sequence[Candidate]) -> None:
    most = max((row.rate for row in rows), default=0.0) or 1.0
    for row in rows:
        bar = "#" * round(_WIDTH * row.rate / most)
        say(f"  staleness {row.max_staleness:>3}  {bar:<{_WIDTH}} {row.rate:>12,.0f} tokens/s")


def _recommend(say: Callable[[str], None], plan: Plan, config: Config) -> None:
    best, split = plan.best, plan.best.split
    if best.prediction is None:
        return
    if split.is_in_process:
        say("Best: the GPU trains and generates in turn")
    elif split.is_colocated:
        say(f"Best: each of the {split.num_learner_gpus} GPUs trains and generates in turn")
    else:
        each = f" of {split.num_server_gpus} GPUs each" if split.num_server_gpus > 1 else ""
        servers = f"{_count(split.num_servers, 'server')}{each}"
        say(f"Best: {_count(split.num_learner_gpus, 'GPU')} for the learner and {servers}")
    settings = settings_of(best, config)
    say(f"      {' '.join(settings)}")
    if _FOLDER in settings:
        say(f"      {_FOLDER} stands for a folder that all machines see under the same path")
    predicted = best.prediction
    say(f"      {predicted.tokens_per_s:,.0f} tokens/s, {predicted.step_s:,.2f} s per step")
    say(f"      controller: {predicted.events_per_s:,.0f} events/s, its event loop is {best.controller_load:.1%} busy")
    if (all_of_them := plan.whole).split.num_gpus > split.num_gpus:
        say(
            f"      more GPUs do not help: {all_of_them.split.num_gpus} would give {all_of_them.rate:,.0f} tokens/s, "
            f"because {_limit(predicted)}"
        )
    if (older := plan.older) is not None:
        on = "" if older.split == split else f" on {older.split} GPUs"
        say(
            f"      rollout.max_staleness={older.max_staleness}{on} would give {older.rate:,.0f} tokens/s; "
            "older samples slow down learning (docs/async.md)"
        )


def _limit(predicted: Prediction) -> str:
    """The largest part of a step among those that more GPUs do not shorten."""
    rest_s = predicted.step_s - predicted.wait_s - predicted.train_s - predicted.publish_s
    seconds, what = max(
        (predicted.wait_s, "waiting for rollouts, and more servers do not shorten the longest episode"),
        (predicted.publish_s, "publishing weights"),
        (rest_s, "work of the controller, such as assembling batches and records"),
    )
    return f"{seconds / predicted.step_s:.0%} of a step is {what}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def settings_of(row: Candidate, config: Config) -> list[str]:
    """What to give ``headwater train`` so that the GPUs are divided as in ``row``."""
    from headwater.config.server_checks import backend_traits
    from headwater.planner.hardware import GPUS_PER_MACHINE
    from headwater.planner.plan import transfer_of

    split, found = row.split, []
    used = _with_large_servers(config, split.num_server_gpus)
    if split.num_learner_gpus > 1 or split.num_gpus > GPUS_PER_MACHINE:
        # torchrun starts ranks too, but generates only in the process of rank 0, and only on one machine.
        found += ["cluster=ray", f"cluster.learner.num_ranks={split.num_learner_gpus}"]
    if split.is_colocated:
        found.append("rollout.placement=colocated")
    else:
        found += ["rollout.placement=disaggregated", f"rollout.launch.num_servers={split.num_servers}"]
    if split.num_server_gpus > 1:
        found.append(f"rollout.launch.tensor_parallel={split.num_server_gpus}")
    for key in ("backend", "weight_transfer"):
        if (value := getattr(used.rollout, key)) != getattr(config.rollout, key):
            found.append(f"rollout.{key}={value}")
    transfer = transfer_of(split, backend_traits(used), used.rollout.weight_transfer)
    if transfer == "file" and split.num_gpus > GPUS_PER_MACHINE and not config.rollout.weight_folder:
        found.append(_FOLDER)
    return [*found, f"rollout.max_staleness={row.max_staleness}"]


def _draw(path: Path, rows: Sequence[Candidate]) -> None:
    # The figure classes are used directly, because pyplot keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [str(row.max_staleness) for row in rows]
    axes.plot(names, [row.rate for row in rows], "o-", label="trained tokens/s")
    axes.set(
        xlabel="rollout.max_staleness", ylabel="tokens/s", title=f"Predicted, GPUs {rows[0].split if rows else ''}"
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path, format="png")
