"""Processor time per episode of everything but the model: prompts, episodes, the engine's bookkeeping, rewards, groups.

    python benchmarks/episode_overhead.py [--prompts 64] [--samples 16] [--max-staleness 0 4]

The parts are those of a training run: the built-in task ``arithmetic``, the workflow ``rlvr``, its scorer, the executor
and the embedded engine. Only the model is missing: the runner of the engine takes tokens from a list instead of
computing logits. Each step takes a batch and closes the books as the trainer does, and trains on nothing.

The times are those of each thread, so a busy machine changes them little. ``trainer`` is the thread that takes batches,
``rollouts`` runs the episodes and draws prompts, and ``engine`` schedules requests and collects their tokens.
``rollouts_in_wait`` is the part of ``rollouts`` for which a synchronous trainer waits. The rest, building the prompts
of the next step, is done while it trains.
``prompt_batches`` is the number of batches per step in which the engine computes prompts. With a model, each of them
launches all kernels of a forward pass.
``--profile rollouts`` or ``--profile engine`` shows the functions of one thread (Python 3.11; slower).
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from options import parser_of
from record import write_record
from torch import Tensor

from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.core.interpreter import collect_young_garbage, sharing_interpreter
from headwater.data.load import load_dataset
from headwater.engine.engine import Engine
from headwater.rollout.executor import WorkflowExecutor
from headwater.rollout.source import PromptStream
from headwater.trainer.rollout_setup import RolloutParts, build_rollout

THREADS = {"trainer": "MainThread", "rollouts": "headwater-rollouts", "engine": "headwater-engine"}


def config_of(options: argparse.Namespace, max_staleness: int) -> Config:
    num_episodes = options.prompts * options.samples
    settings = {
        "model.path": "tiny:qwen3",
        "model.device": "cpu",
        "data.train": "arithmetic",
        "data.task_args": '{"style": "words", "max_operand": 99, "operations": ["+", "-"], "num_operands": 3}',
        "data.system_prompt": "Answer with the number only.",
        "data.num_train_rows": 4096,
        "data.max_prompt_tokens": 256,
        "rollout.num_samples_per_prompt": options.samples,
        "rollout.max_new_tokens": options.new_tokens,
        "rollout.max_staleness": max_staleness,
        "trainer.num_prompts_per_step": options.prompts,
        "trainer.total_steps": 10**6,
        # As on a GPU: all samples of a step run together.
        "engine.max_sequences": num_episodes,
        "engine.max_prefill_tokens": 16384,
        "engine.page_tokens": 64,
        "engine.kv_cache_gib": 0.5,
        "eval.before": "false",
        "eval.after": "false",
    }
    return load_config(None, [f"{key}={value}" for key, value in settings.items()]).config


def remove_model(engine: Engine, tokens: list[int]) -> None:
    """Let the engine sample ``tokens`` in turn, without computing anything for them."""
    runner: Any = engine._runner
    choices = torch.tensor(tokens)

    def sample(logits: Tensor, settings: object, positions: Tensor) -> tuple[Tensor, Tensor]:
        drawn = choices[(torch.arange(len(positions)) + positions) % len(choices)]
        return drawn, torch.full(drawn.shape, -1.0)

    runner._hidden = lambda input_ids, *_: torch.zeros(len(input_ids), 1)
    runner._logits = lambda hidden: hidden
    runner._sample = sample
    runner.cache.copy_pages = lambda sources, targets: None


class PromptBatches:
    """Counts the batches in which an engine computes prompts."""

    def __init__(self, engine: Engine) -> None:
        self.count = 0
        runner: Any = engine._runner
        self._prefill = runner.prefill
        runner.prefill = self._counted

    def _counted(self, *arguments: Any) -> Any:
        self.count += 1
        return self._prefill(*arguments)


class Steps:
    """Takes batches as the trainer does."""

    def __init__(self, config: Config, parts: RolloutParts) -> None:
        dataset = load_dataset(config.data, parts.tokenizer, "train", config.run.seed)
        assert dataset is not None
        self._stream = PromptStream(dataset, config.run.seed, config.data.shuffle)
        assert isinstance(parts.train_rollouts, WorkflowExecutor)
        self._rollouts = parts.train_rollouts
        self._engine = parts.engine
        self._tasks = parts.tasks
        self._version = 0
        self.waited_s = 0.0
        """Processor time of the thread ``rollouts`` while a batch was waited for."""

    def run(self, count: int) -> None:
        for _ in range(count):
            before = clocks()["rollouts"]
            self._rollouts.prepare_batch(self._stream)
            self.waited_s += clocks()["rollouts"] - before
            self._tasks.call(lambda: None, "the end of what is done while the learner trains")
            self._version += 1
            self._engine.set_version(self._version)
            self._rollouts.trained(self._version, str)
            self._rollouts.close_books(self._stream.state_dict)
            collect_young_garbage()
            self._rollouts.set_version(self._version)


@contextmanager
def steps_of(config: Config) -> Iterator[tuple[Steps, RolloutParts]]:
    parts = build_rollout(config, config.model.path)
    try:
        assert isinstance(parts.engine, Engine)
        remove_model(parts.engine, parts.tokenizer.encode("0123456789", add_special_tokens=False))
        with sharing_interpreter():
            yield Steps(config, parts), parts
    finally:
        parts.close()


def clocks() -> dict[str, float]:
    """The processor time of each thread so far, and that of the whole process."""
    idents = {each.name: each.ident for each in threading.enumerate() if each.ident is not None}
    found = {part: time.pthread_getcpuclockid(idents[name]) for part, name in THREADS.items()}
    return {part: time.clock_gettime(clock) for part, clock in found.items()} | {"process": time.process_time()}


def measure(config: Config, num_steps: int, num_runs: int) -> dict[str, float]:
    """Milliseconds per episode by thread, and ``prompt_batches`` per step: the medians of the runs."""
    per_run = num_steps * config.trainer.num_prompts_per_step * config.rollout.num_samples_per_prompt
    runs: list[dict[str, float]] = []
    with steps_of(config) as (steps, parts):
        assert isinstance(parts.engine, Engine)
        batches = PromptBatches(parts.engine)
        steps.run(config.rollout.max_staleness + 2)
        for _ in range(num_runs):
            before, num_before = {**clocks(), "rollouts_in_wait": steps.waited_s}, batches.count
            steps.run(num_steps)
            after = {**clocks(), "rollouts_in_wait": steps.waited_s}
            times = {part: (after[part] - before[part]) / per_run * 1e3 for part in after}
            runs.append({**times, "prompt_batches": (batches.count - num_before) / num_steps})
    return {part: statistics.median(run[part] for run in runs) for part in runs[0]}


def show_profile(config: Config, num_steps: int, thread: str) -> None:
    """The functions of a thread, by their own time."""
    profile = cProfile.Profile()
    with steps_of(config) as (steps, parts):
        assert isinstance(parts.engine, Engine)
        steps.run(config.rollout.max_staleness + 2)
        for action in (profile.enable, profile.disable):
            if thread == "rollouts":
                parts.tasks.call(action, "profiling")
            else:
                parts.engine._call(action, "profiling")
            if action == profile.enable:
                steps.run(num_steps)
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step (default 64)")
    parser.add_argument("--samples", type=int, default=16, help="samples per prompt (default 16)")
    parser.add_argument("--new-tokens", type=int, default=4, help="tokens per response (default 4)")
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[0, 4], help="0 is synchronous (default 0 4)")
    parser.add_argument("--steps", type=int, default=8, help="steps per run (default 8)")
    parser.add_argument("--runs", type=int, default=5, help="runs; the median is reported (default 5)")
    parser.add_argument("--profile", choices=["rollouts", "engine"], help="show the functions of this thread instead")
    options = parser.parse_args()
    rows = []
    for max_staleness in options.max_staleness:
        config = config_of(options, max_staleness)
        if options.profile:
            show_profile(config, options.steps, options.profile)
            continue
        times = measure(config, options.steps, options.runs)
        num_batches = times.pop("prompt_batches")
        rows.append({"max_staleness": max_staleness, "cpu_ms_per_episode": times, "prompt_batches": num_batches})
        shown = "  ".join(f"{part} {value:.4f}" for part, value in times.items())
        print(f"max_staleness {max_staleness}, ms per episode: {shown}, prompt batches {num_batches:.1f}", flush=True)
    write_record(options.out, torch.device("cpu"), prompts=options.prompts, samples=options.samples, rows=rows)


if __name__ == "__main__":
    main()
