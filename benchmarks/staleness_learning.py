"""The effect of stale samples on learning: the held-out reward after training, by ``max_staleness`` and policy loss.

    python benchmarks/staleness_learning.py --plot docs/images/staleness.png
    python benchmarks/staleness_learning.py --losses ppo ppo-recompute decoupled decoupled-masked --staleness 4 16 \\
        --learning-rate 5e-4 1e-3 2e-3 --epochs 2 4 --processes 8        # a sweep: every combination

The task is the quickstart's, with a high learning rate and many updates per batch, so that the policy changes fast.
``ppo`` clips around the policy that sampled (``old_logprobs=rollout``). ``decoupled`` clips around the policy at the
start of the step and weights samples by the ratio of the two policies (``old_logprobs=recompute``);
``decoupled-masked`` also drops tokens whose ratio is above 5, and ``ppo-recompute`` clips around the policy at the
start of the step without any weight. All runs of a seed continue from the same supervised start. By default two runs
share the cores, with one torch thread each.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from options import parser_of
from record import write_record
from rich.console import Console
from training_run import mean_lag, records, train

from headwater.config.load import load_config
from headwater.learner.build import LearnerSpec
from headwater.models.load import load_tokenizer
from headwater.observe.progress import Display
from headwater.trainer.learner_setup import build_training
from headwater.trainer.warm_start import warm_start

RECIPE = "quickstart"
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"algorithm.policy_loss": "ppo", "algorithm.old_logprobs": "rollout"},
    "decoupled": {"algorithm.policy_loss": "decoupled", "algorithm.old_logprobs": "recompute"},
    "decoupled-masked": {
        "algorithm.policy_loss": "decoupled",
        "algorithm.old_logprobs": "recompute",
        "algorithm.policy_loss_args": {"weight": "mask", "upper": 5.0},
    },
    "ppo-recompute": {"algorithm.policy_loss": "ppo", "algorithm.old_logprobs": "recompute"},
}
COLOURS = {"ppo": "tab:orange", "decoupled": "tab:blue", "decoupled-masked": "tab:green", "ppo-recompute": "tab:red"}


@dataclass(frozen=True)
class Job:
    loss: str
    max_staleness: int
    seed: int
    learning_rate: float
    epochs: int
    settings: Mapping[str, Any]
    """What all runs of the comparison have in common."""

    def overrides(self, start: Path) -> dict[str, Any]:
        return {
            **self.settings,
            **LOSSES[self.loss],
            "run.name": f"{self.loss}-{self.max_staleness}-{self.seed}",
            "run.seed": self.seed,
            "model.path": str(start),
            "warm_start.num_steps": 0,
            "rollout.max_staleness": self.max_staleness,
            "learner.learning_rate": self.learning_rate,
            "learner.num_epochs": self.epochs,
        }


@dataclass(frozen=True)
class Outcome:
    loss: str
    max_staleness: int
    seed: int
    learning_rate: float
    epochs: int
    reward: float
    """Held out, after the last step."""
    train_reward: float
    """Mean over all steps: how fast it learned."""
    mean_lag: float
    seconds: float


def common_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model.device": "cpu",
        "learner.num_minibatches": options.minibatches,
        "trainer.total_steps": options.steps,
        "trainer.num_prompts_per_step": options.prompts,
        "trainer.save_rollouts_every_steps": 0,
        "eval.every_steps": 0,
        "eval.before": False,
    }


def save_start(seed: int, num_steps: int, folder: Path) -> Path:
    """The model after the recipe's supervised start."""
    torch.set_num_threads(1)
    overrides = [f"run.seed={seed}", f"warm_start.num_steps={num_steps}", "model.device=cpu"]
    config = load_config(RECIPE, overrides).config
    tokenizer = load_tokenizer(config.model.path)
    training = build_training(LearnerSpec(config, config.model.path, config.model.path), tokenizer)
    learner, quiet = training.learner, Display(Console(file=io.StringIO()))
    warm_start(
        config.warm_start,
        learner,
        tokenizer,
        training.train_data,
        seed=seed,
        template_args=config.data.chat_template_args,
        sampled_reward=lambda: 0.0,
        display=quiet,
    )
    learner.save(folder)
    return folder / "model"


def run_job(job: Job, start: Path) -> Outcome:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        run = train(RECIPE, job.overrides(start), Path(folder))
        steps, evaluations = records(run, "train"), records(run, "eval")
    return Outcome(
        job.loss,
        job.max_staleness,
        job.seed,
        job.learning_rate,
        job.epochs,
        reward=evaluations[-1]["reward/mean"],
        train_reward=statistics.fmean(each["reward/mean"] for each in steps),
        mean_lag=mean_lag(steps),
        seconds=sum(each["time/step_s"] for each in steps),
    )


def run_all(jobs: Sequence[Job], num_warm_start_steps: int, num_processes: int) -> list[Outcome]:
    outcomes = []
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        begun = {
            seed: pool.submit(save_start, seed, num_warm_start_steps, Path(folder) / f"start-{seed}")
            for seed in sorted({each.seed for each in jobs})
        }
        starts = {seed: future.result() for seed, future in begun.items()}
        for future in as_completed([pool.submit(run_job, each, starts[each.seed]) for each in jobs]):
            outcome = future.result()
            outcomes.append(outcome)
            print(
                f"{outcome.loss:<16} staleness {outcome.max_staleness:>2}  seed {outcome.seed}  "
                f"learning rate {outcome.learning_rate:g}  epochs {outcome.epochs}  "
                f"held-out {outcome.reward:.3f}  lag {outcome.mean_lag:.1f}  {outcome.seconds:.0f} s",
                flush=True,
            )
    return outcomes


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One per loss, bound, learning rate and number of epochs: the mean over the seeds, and every seed's reward."""
    rows = []
    for case in sorted({_case(each) for each in outcomes}):
        rate, epochs, loss, bound = case
        found = [each for each in outcomes if _case(each) == case]
        rewards = [each.reward for each in sorted(found, key=lambda each: each.seed)]
        rows.append(
            {
                "learning_rate": rate,
                "epochs": epochs,
                "loss": loss,
                "max_staleness": bound,
                "reward": statistics.fmean(rewards),
                "rewards": rewards,
                "train_reward": statistics.fmean(each.train_reward for each in found),
                "mean_lag": statistics.fmean(each.mean_lag for each in found),
            }
        )
    return rows


def _case(outcome: Outcome) -> tuple[float, int, str, int]:
    return outcome.learning_rate, outcome.epochs, outcome.loss, outcome.max_staleness


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One panel for each learning rate and number of epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = sorted({(row["learning_rate"], row["epochs"]) for row in rows})
    figure = Figure(figsize=(7 if len(panels) == 1 else 4 * len(panels), 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    bounds = sorted({row["max_staleness"] for row in rows})
    for axes, (rate, epochs) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True
    ):
        shown = [row for row in rows if (row["learning_rate"], row["epochs"]) == (rate, epochs)]
        for loss in dict.fromkeys(row["loss"] for row in shown):
            found = [row for row in shown if row["loss"] == loss]
            places = [bounds.index(row["max_staleness"]) for row in found]
            axes.plot(places, [row["reward"] for row in found], "-", color=COLOURS[loss], linewidth=2, label=loss)
            for place, row in zip(places, found, strict=True):
                axes.plot([place] * len(row["rewards"]), row["rewards"], "o", color=COLOURS[loss], alpha=0.5)
        axes.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
        axes.set(xlabel="rollout.max_staleness", title=f"learning rate {rate:g}, epochs {epochs}")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out reward after training")
    figure.axes[0].legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["ppo", "decoupled"])
    parser.add_argument("--steps", type=int, default=40, help="training steps per run (default 40)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step (default 32)")
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[5e-4], help="default 5e-4")
    parser.add_argument("--minibatches", type=int, default=4, help="updates per pass over a batch (default 4)")
    parser.add_argument("--epochs", type=int, nargs="+", default=[2], help="passes over a batch (default 2)")
    parser.add_argument("--warm-start-steps", type=int, default=60, help="supervised steps (default 60)")
    parser.add_argument("--processes", type=int, default=2, help="concurrent runs (default 2)")
    parser.add_argument("--plot", type=Path, help="draw the table here, as a PNG")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    common = common_settings(options)
    jobs = [
        Job(loss, bound, seed, rate, epochs, common)
        for seed in options.seeds
        for bound in sorted(options.staleness, reverse=True)
        for rate in options.learning_rate
        for epochs in options.epochs
        for loss in options.losses
    ]
    outcomes = run_all(jobs, options.warm_start_steps, options.processes)
    rows = rows_of(outcomes)
    print(f"\n{'rate':>6} {'epochs':>6} {'loss':<16} {'staleness':>9}  {'held-out':>8}  {'lag':>5}  per seed")
    for row in rows:
        seeds = " ".join(f"{reward:.3f}" for reward in row["rewards"])
        print(
            f"{row['learning_rate']:>6g} {row['epochs']:>6} {row['loss']:<16} {row['max_staleness']:>9}  "
            f"{row['reward']:>8.3f}  {row['mean_lag']:>5.1f}  {seeds}"
        )
    if options.plot is not None:
        draw(options.plot, rows)
    write_record(
        options.out,
        torch.device("cpu"),
        load_before=load,
        settings=common,
        rows=rows,
        runs=[asdict(each) for each in outcomes],
    )


if __name__ == "__main__":
    main()
