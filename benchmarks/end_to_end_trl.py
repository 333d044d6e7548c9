"""TRL's side of ``end_to_end.py``; runs in an environment that has TRL, and is started by that script.

The settings that decide the speed are in TRL's favour: activations are kept (its default computes them twice), vLLM
does not make texts, and nothing is logged or saved. As with Headwater, the trained weights are float32, and on a GPU
passes are in bfloat16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from end_to_end_job import Job, Outcome, Step, compute_score, host_peak_gib
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_GIB = 2**30


class Watch:
    """Seconds by name within one step, and the steps that are done."""

    def __init__(self, device: str) -> None:
        self.steps: list[Step] = []
        self.held_gib: list[float] = []
        self.began = 0.0
        self._seconds: dict[str, float] = {}
        self._last = 0.0
        self._on_gpu = device == "cuda"

    def begin(self) -> None:
        """The first step begins with the call of ``train``."""
        self.began = self._last = self._now()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(name, self._now() - started)

        return call

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def finish(self, started: float) -> None:
        """``started`` is when the step began to work; before that, its data were loaded."""
        now, seconds = self._now(), self._seconds
        publish, reward = seconds.get("publish", 0.0), seconds["reward"]
        rollout = seconds["rollout"] - publish + reward
        stages = {
            "rollout": rollout,
            "experience": seconds["prepare"] - publish - rollout,
            "train": now - started - seconds["prepare"],
            "publish": publish,
            "generate": seconds["generate"],
            "reward": reward,
        }
        self.steps.append(Step.of(now - self._last, stages))
        self.held_gib.append(torch.cuda.memory_allocated() / _GIB if self._on_gpu else host_peak_gib())
        self._seconds, self._last = {}, now
        print(f"TRL {self.steps[-1]}", flush=True)

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


class StepEnds(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._watch.finish(self._started)


class Seen:
    """A reward function that remembers what it was given last."""

    __name__ = "score"

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.num_tokens = 0

    def __call__(self, *, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.rewards = [compute_score() for _ in completion_ids]
        self.num_tokens = sum(len(each) for each in completion_ids)
        return self.rewards


def settings_of(job: Job, folder: str) -> GRPOConfig:
    on_cpu = job.device == "cpu"
    with_vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": job.vllm_memory,
        "vllm_max_model_length": max(job.prompt_tokens) + job.num_new_tokens,
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
    }
    without = {"generation_kwargs": {"min_new_tokens": job.num_new_tokens}}
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=job.microbatch,
        gradient_accumulation_steps=job.num_responses // job.microbatch,
        num_generations=job.num_samples,
        max_completion_length=job.num_new_tokens,
        temperature=1.0,
        max_steps=job.num_steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        gradient_checkpointing=job.checkpoint_activations,
        bf16=job.dtype == "bfloat16",
        use_cpu=on_cpu,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu,
        **(with_vllm if job.use_vllm else without),
    )


def main(job_file: Path, outcome_file: Path) -> None:
    began = time.perf_counter()
    job = Job.read(job_file)
    if job.num_threads:
        torch.set_num_threads(job.num_threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job.model, padding_side="left")
    dtype = getattr(torch, job.dtype) if job.lora_rank else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    watch, seen = Watch(job.device), Seen()
    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=seen,
            args=settings_of(job, folder),
            train_dataset=Dataset.from_list([{"prompt": chat} for chat in job.chats]),
            processing_class=tokenizer,
            callbacks=[StepEnds(watch)],
            peft_config=_adapters(job),
        )
        trainer._prepare_inputs = watch.timed("prepare", trainer._prepare_inputs)
        trainer._generate = watch.timed("rollout", trainer._generate)
        trainer._calculate_rewards = watch.timed("reward", trainer._calculate_rewards)
        if job.use_vllm:
            engine = trainer.vllm_generation
            engine.generate = watch.timed("generate", engine.generate)
            engine.sync_weights = watch.timed("publish", engine.sync_weights)
        else:
            model.generate = watch.timed("generate", model.generate)
        watch.begin()
        trainer.train()
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in job.chats]
    lengths = sorted(len(each) for each in prompts)
    assert lengths == job.prompt_tokens, f"TRL has prompts of other lengths: {lengths}"
    Outcome(
        load_s=watch.began - began,
        steps=watch.steps,
        new_tokens=seen.num_tokens,
        num_rewards=len(set(seen.rewards)),
        peak_gib=host_peak_gib() if job.device == "cpu" else torch.cuda.max_memory_allocated() / _GIB,
        held_gib=watch.held_gib,
        versions=_versions(job),
    ).write(outcome_file)


def _adapters(job: Job) -> Any:
    if not job.lora_rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=job.lora_rank, lora_alpha=2 * job.lora_rank, target_modules="all-linear")


def _versions(job: Job) -> dict[str, str]:
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    if job.use_vllm:
        import vllm

        versions["vllm"] = vllm.__version__
    return versions


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
