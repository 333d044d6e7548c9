"""Headwater's side of ``grpo_step_vs_trl.py``: the trainer of ``headwater train``, built from a config."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from grpo_step_job import Job, Outcome, StepTimes, peak_gib, score
from pyarrow.parquet import read_table
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import headwater
from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.core.trajectory import Trajectory
from headwater.learner.build import LearnerSpec
from headwater.observe.progress import Display, Reporter
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.learner_setup import build_training
from headwater.trainer.loop import Trainer
from headwater.trainer.rollout_setup import build_rollout
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.rlvr import rlvr


class FullLength:
    """``rlvr`` that ignores the model's end token and always generates ``max_new_tokens``."""

    def __init__(self, context: WorkflowContext) -> None:
        self._context = replace(context, sampling=replace(context.sampling, ignore_end=True))

    async def run(self, episode: Episode) -> Trajectory:
        return await rlvr(Episode(self._context, episode.engine, episode.data))


def compute_score(*, solution_str: str, **_: Any) -> float:
    return score(solution_str)


class Watch(Display):
    """Notes after every step what forward and optimiser took, and the peak so far: the last checkpoint is no part."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = {"forward": 0.0, "optimizer": 0.0}
        self.parts: list[Mapping[str, float]] = []
        self.peak_gib = 0.0
        self._since = self._cpu = 0.0

    def attach(self, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: self._begin())
        module.register_forward_hook(lambda *_: self._end("forward"))
        register_optimizer_step_pre_hook(lambda *_: self._begin())
        register_optimizer_step_post_hook(lambda *_: self._end("optimizer"))

    def _begin(self) -> None:
        self._since = time.perf_counter()

    def _end(self, name: str) -> None:
        self.seconds[name] += time.perf_counter() - self._since

    @contextmanager
    def stage(self, name: str, total: int, start: int = 0) -> Iterator[Reporter]:
        self._cpu = time.process_time()
        yield self

    def update(self, done: int, shown: Mapping[str, str]) -> None:
        cpu = time.process_time()
        self.parts.append({**self.seconds, "cpu": cpu - self._cpu})
        self.seconds, self._cpu = dict.fromkeys(self.seconds, 0.0), cpu
        self.peak_gib = peak_gib()


def config_of(job: Job, folder: Path) -> Config:
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": chat, "data_source": "questions"}) + "\n" for chat in job.chats))
    settings = {
        "run.root": str(folder / "runs"),
        "model.path": job.model,
        "model.device": "cpu",
        "data.train": str(rows),
        "data.max_prompt_tokens": 64,
        "rollout.workflow": f"{__file__}:FullLength",
        "rollout.num_samples_per_prompt": job.num_samples,
        "rollout.max_new_tokens": job.num_new_tokens,
        "engine.kv_cache_gib": 0.25,
        "reward.function": f"{__file__}:compute_score",
        "learner.learning_rate": job.learning_rate,
        "learner.max_tokens_per_microbatch": job.microbatch,
        "learner.skip_zero_advantages": False,
        "trainer.total_steps": job.num_steps,
        "trainer.num_prompts_per_step": len(job.chats),
        "trainer.num_threads": job.num_threads,
    }
    return load_config(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()]).config


def main(job_file: Path, outcome_file: Path) -> None:
    job = Job.read(job_file)
    torch.set_num_threads(job.num_threads)
    watch = Watch()
    with TemporaryDirectory() as folder:
        config = config_of(job, Path(folder))
        rollout = build_rollout(config, config.model.path)
        try:
            training = build_training(LearnerSpec(config, config.model.path, config.model.path), rollout.tokenizer)
            watch.attach(training.learner.actor.engine.module)
            run = RunDirectory.create(Path(config.run.root), config.run.name)
            Trainer(config, rollout, training, run, watch).fit()
        finally:
            rollout.close()
        records = [each for each in run.read_metrics() if each["kind"] == "train"]
        rollouts = read_table(max((run.path / "rollouts").glob("*.parquet"))).to_pylist()
    steps = []
    for record, part in zip(records, watch.parts, strict=True):
        backward = record["time/train_s"] - part["forward"] - part["optimizer"]
        steps.append(StepTimes(record["time/step_s"], record["time/generate_s"], backward=backward, **part))
        print(f"Headwater {steps[-1]}", flush=True)
    Outcome(
        steps=steps,
        prompt_tokens=sorted({each["uid"]: each["prompt_length"] for each in rollouts}.values()),
        new_tokens=sum(sum(each["loss_mask"]) for each in rollouts),
        num_rewards=len({each["reward"] for each in rollouts}),
        peak_gib=watch.peak_gib,
        versions={
            "headwater": headwater.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    ).write(outcome_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
