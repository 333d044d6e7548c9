"""Headwater's side of ``end_to_end.py``: the trainer of ``headwater train``, built from a config."""

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
from end_to_end_job import Job, Outcome, Step, host_peak_gib
from pyarrow.parquet import read_table

import headwater
from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.core.records import Trajectory
from headwater.learner.build import LearnerSpec
from headwater.observe.progress import Display, Reporter
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.learner_setup import build_training
from headwater.trainer.loop import Trainer
from headwater.trainer.memory_setup import plan_run, planned
from headwater.trainer.memory_turns import releases_cache
from headwater.trainer.rollout_setup import build_rollout
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.rlvr import rlvr

_STAGES = {"rollout": "wait", "experience": "experience", "train": "train", "publish": "publish"}
"""Stages of the comparison, and those of the recorder."""


class FullLength:
    """``rlvr`` that ignores the model's end token and always generates ``max_new_tokens``."""

    def __init__(self, context: WorkflowContext) -> None:
        self._context = replace(context, sampling=replace(context.sampling, ignore_end=True))

    async def run(self, episode: Episode) -> Trajectory:
        return await rlvr(Episode(self._context, episode.engine, episode.data))


class Watch(Display):
    """Notes when every step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    @contextmanager
    def stage(self, name: str, total: int, start: int = 0) -> Iterator[Reporter]:
        self.ends = [time.perf_counter()]
        yield self

    def update(self, done: int, shown: Mapping[str, str]) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]


class Unsaved(Trainer):
    """A trainer without the checkpoint at the end, which is no part of a step and takes 20 GB for a 1.5B model."""

    def _save(self, *, is_last: bool = False, is_rescue: bool = False) -> None:
        pass


def config_of(job: Job, folder: Path) -> Config:
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": chat, "data_source": "questions"}) + "\n" for chat in job.chats))
    settings = {
        "run.root": str(folder / "runs"),
        "model.path": job.model,
        "model.device": job.device,
        "model.dtype": job.dtype,
        "data.train": str(rows),
        "data.max_prompt_tokens": max(job.prompt_tokens),
        "rollout.workflow": f"{__file__}:FullLength",
        "rollout.num_samples_per_prompt": job.num_samples,
        "rollout.max_new_tokens": job.num_new_tokens,
        "reward.function": f"{Path(__file__).with_name('end_to_end_job.py')}:compute_score",
        "learner.learning_rate": job.learning_rate,
        "learner.max_tokens_per_microbatch": job.microbatch,
        "learner.skip_zero_advantages": False,
        "learner.checkpoint_activations": job.checkpoint_activations,
        "lora.rank": job.lora_rank,
        "trainer.total_steps": job.num_steps,
        "trainer.num_prompts_per_step": len(job.chats),
        "trainer.num_threads": job.num_threads,
        "eval.before": False,
        "eval.after": False,
        **({"engine.kv_cache_gib": 0.25} if job.device == "cpu" else {}),
    }
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_config(None, [*given, *job.settings]).config


def main(job_file: Path, outcome_file: Path) -> None:
    began = time.perf_counter()
    job = Job.read(job_file)
    if job.num_threads:
        torch.set_num_threads(job.num_threads)
    watch = Watch()
    with TemporaryDirectory() as folder:
        config = config_of(job, Path(folder))
        plan = plan_run(config, job.model)
        built = planned(config, plan)
        rollout = build_rollout(built, job.model)
        try:
            if releases_cache(config, plan):
                rollout.sleep_cache()
            training = build_training(LearnerSpec(built, job.model, job.model), rollout.tokenizer)
            config = replace(training.config, engine=config.engine, learner=config.learner)
            run = RunDirectory.create(Path(config.run.root), config.run.name)
            Unsaved(config, rollout, replace(training, config=config), run, watch, plan=plan).fit()
        finally:
            rollout.close()
        records = [each for each in run.read_metrics() if each["kind"] == "train"]
        rollouts = read_table(max((run.path / "rollouts").glob("*.parquet"))).to_pylist()
    steps = [Step.of(seconds, _stages(record)) for seconds, record in zip(watch.seconds, records, strict=True)]
    for each in steps:
        print(f"Headwater {each}", flush=True)
    on_gpu = [each["memory/gpu_peak_gib"] for each in records if "memory/gpu_peak_gib" in each]
    Outcome(
        load_s=watch.ends[0] - began,
        steps=steps,
        new_tokens=sum(sum(each["loss_mask"]) for each in rollouts),
        num_rewards=len({each["reward"] for each in rollouts}),
        # The stages of a step reset the peak of the process.
        peak_gib=max(on_gpu or [host_peak_gib(), *(each["memory/host_peak_gib"] for each in records)]),
        held_gib=[each["memory/gpu_gib" if on_gpu else "memory/host_gib"] for each in records],
        versions={
            "headwater": headwater.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    ).write(outcome_file)


def _stages(record: Mapping[str, Any]) -> dict[str, float]:
    stages = {name: record.get(f"time/{ours}_s", 0.0) for name, ours in _STAGES.items()}
    return stages | {name: record.get(f"time/{name}_s", 0.0) for name in ("generate", "reward")}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
