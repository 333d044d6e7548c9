"""TRL's side of ``grpo_step_vs_trl.py``; runs in an environment that has TRL, and is started by that script.

The settings that decide the speed are TRL's fastest here: float32 (this CPU has no bfloat16), activations kept (TRL's
default computes them twice), all samples in one pass by default, transformers' ``generate``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from grpo_step_job import Job, Outcome, StepTimes, peak_gib, score
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Watch:
    """Seconds by name within one step, and the steps that are done."""

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return call

    def finish(self) -> None:
        seconds, self.seconds = self.seconds, {}
        passes = seconds["training_step"] - seconds["prepare"]
        self.steps.append(
            StepTimes(
                step=seconds["step"],
                generate=seconds["generate"],
                forward=seconds["forward"],
                backward=passes - seconds["forward"],
                optimizer=seconds["step"] - seconds["training_step"],
                cpu=seconds["cpu"],
            )
        )


class StepEnds(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._started = self._cpu = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._watch.seconds["step"] = time.perf_counter() - self._started
        self._watch.seconds["cpu"] = time.process_time() - self._cpu
        self._watch.finish()
        print(f"TRL {self._watch.steps[-1]}", flush=True)


class Seen:
    """A reward function that remembers what it was given last."""

    __name__ = "score"

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.num_tokens = 0

    def __call__(self, *, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.rewards = [score(completion[0]["content"]) for completion in completions]
        self.num_tokens = sum(len(each) for each in completion_ids)
        return self.rewards


def settings_of(job: Job, folder: str) -> GRPOConfig:
    num_samples = len(job.chats) * job.num_samples
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=job.microbatch,
        gradient_accumulation_steps=num_samples // job.microbatch,
        num_generations=job.num_samples,
        max_completion_length=job.num_new_tokens,
        generation_kwargs={"min_new_tokens": job.num_new_tokens},
        temperature=1.0,
        max_steps=job.num_steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main(job_file: Path, outcome_file: Path) -> None:
    job = Job.read(job_file)
    torch.set_num_threads(job.num_threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    watch, seen = Watch(), Seen()
    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=seen,
            args=settings_of(job, folder),
            train_dataset=Dataset.from_list([{"prompt": chat} for chat in job.chats]),
            processing_class=tokenizer,
            callbacks=[StepEnds(watch)],
        )
        model.generate = watch.timed("generate", model.generate)
        trainer._prepare_inputs = watch.timed("prepare", trainer._prepare_inputs)
        trainer.compute_loss = watch.timed("forward", trainer.compute_loss)
        trainer.training_step = watch.timed("training_step", trainer.training_step)
        trainer.train()
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in job.chats]
    Outcome(
        steps=watch.steps,
        prompt_tokens=sorted(len(each) for each in prompts),
        new_tokens=seen.num_tokens,
        num_rewards=len(set(seen.rewards)),
        peak_gib=peak_gib(),
        versions={"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
    ).write(outcome_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
