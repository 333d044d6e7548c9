"""The effect of stale samples on learning: the held-out reward after training, by ``max_staleness`` and policy loss.

    python benchmarks/staleness_learning.py --plot docs/images/staleness.png

The task is the quickstart's, with a high learning rate and many updates per batch, so that the policy changes fast.
``ppo`` clips around the policy that sampled (``old_logprobs=rollout``). ``decoupled`` clips around the policy at the
start of the step and weights samples by the ratio of the two policies (``old_logprobs=recompute``). All runs of a seed
continue from the same supervised start. By default two runs share the cores, with one torch thread each.
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
}


@dataclass(frozen=True)
class Job:
    loss: str
    max_staleness: int
    seed: int
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
        }


@dataclass(frozen=True)
class Outcome:
    loss: str
    max_staleness: int
    seed: int
    reward: float
    """Held out, after the last step."""
    train_reward: float
    """Mean over all steps: how fast it learned."""
    mean_lag: float
    seconds: float


def common_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model.device": "cpu",
        "learner.learning_rate": options.learning_rate,
        "learner.num_minibatches": options.minibatches,
        "learner.num_epochs": options.epochs,
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
                f"{outcome.loss:<10} staleness {outcome.max_staleness:>2}  seed {outcome.seed}  "
                f"held-out {outcome.reward:.3f}  lag {outcome.mean_lag:.1f}  {outcome.seconds:.0f} s",
                flush=True,
            )
    return outcomes


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One per loss and bound: mean, lowest and highest over the seeds."""
    rows = []
    for loss, bound in sorted({(each.loss, each.max_staleness) for each in outcomes}):
        found = [each for each in outcomes if (each.loss, each.max_staleness) == (loss, bound)]
        rewards = [each.reward for each in sorted(found, key=lambda each: each.seed)]
        rows.append(
            {
                "loss": loss,
                "max_staleness": bound,
                "reward": statistics.fmean(rewards),
                "rewards": rewards,
                "train_reward": statistics.fmean(each.train_reward for each in found),
                "mean_lag": statistics.fmean(each.mean_lag for each in found),
            }
        )
    return rows


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bounds = sorted({row["max_staleness"] for row in rows})
    for loss, color in (("ppo", "tab:orange"), ("decoupled", "tab:blue")):
        found = [row for row in rows if row["loss"] == loss]
        places = [bounds.index(row["max_staleness"]) for row in found]
        label = {"ppo": "PPO, old_logprobs rollout", "decoupled": "decoupled, old_logprobs recompute"}[loss]
        axes.plot(places, [row["reward"] for row in found], "-", color=color, linewidth=2, label=label)
        for place, row in zip(places, found, strict=True):
            axes.plot([place] * len(row["rewards"]), row["rewards"], "o", color=color, alpha=0.5)
    axes.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
    axes.set(xlabel="rollout.max_staleness", ylabel="held-out reward after training")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--steps", type=int, default=40, help="training steps per run (default 40)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step (default 32)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="default 5e-4")
    parser.add_argument("--minibatches", type=int, default=4, help="updates per pass over a batch (default 4)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over a batch (default 2)")
    parser.add_argument("--warm-start-steps", type=int, default=60, help="supervised steps (default 60)")
    parser.add_argument("--processes", type=int, default=2, help="concurrent runs (default 2)")
    parser.add_argument("--plot", type=Path, help="draw the table here, as a PNG")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    common = common_settings(options)
    jobs = [
        Job(loss, bound, seed, common)
        for bound in sorted(options.staleness, reverse=True)
        for seed in options.seeds
        for loss in options.losses
    ]
    outcomes = run_all(jobs, options.warm_start_steps, options.processes)
    rows = rows_of(outcomes)
    print(f"\n{'loss':<10} {'staleness':>9}  {'held-out':>8}  {'per seed':<24}  {'in training':>11}  {'mean lag':>8}")
    for row in rows:
        seeds = " ".join(f"{reward:.3f}" for reward in row["rewards"])
        print(
            f"{row['loss']:<10} {row['max_staleness']:>9}  {row['reward']:>8.3f}  {seeds:<24}  "
            f"{row['train_reward']:>11.3f}  {row['mean_lag']:>8.2f}"
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
