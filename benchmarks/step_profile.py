"""Where the time of a training step goes: by stage, by Python function and by CUDA kernel.

    python benchmarks/step_profile.py short async grpo --model FOLDER_OF_SMOLLM2 --out gpu_step_profile.json

(On an H200 about a minute for each of ``short`` and ``async`` and two for ``grpo``.)
Each case is a run of the trainer in this process, like ``headwater train``:

``short``   64 prompts x 16 samples of about 4 tokens: sums of three numbers, answered by the model in ``--model``
            (random weights in its shape without one). Almost all of its time is fixed costs.
``async``   The same with ``rollout.max_staleness=4`` and recomputed log-probs.
``grpo``    32 prompts x 8 samples x 512 tokens with random weights in the shape of Qwen2.5-1.5B.

The first ``--steps`` steps are timed undisturbed. During the next ``--sampled`` steps a thread notes every 2 ms which
function each thread executes, and torch's profiler records one more step. ``KEY=VALUE`` arguments change the settings
of all cases. ``--shape tiny`` with ``--scale 8`` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from options import parser_of
from record import write_record
from rich.console import Console
from shapes import build_model, default_device, default_dtype

from headwater.config.explain import to_yaml
from headwater.config.load import load_config
from headwater.core.trajectory import Trajectory
from headwater.learner import learner as learner_module
from headwater.learner.build import LearnerSpec
from headwater.models.builtin.tiny import build_tokenizer
from headwater.models.load import load_tokenizer
from headwater.observe.progress import Display
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.learner_setup import build_training
from headwater.trainer.loop import Trainer
from headwater.trainer.recorder import Recorder
from headwater.trainer.rollout_setup import build_rollout
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.rlvr import rlvr

CASES = ("short", "async", "grpo")
SAMPLE_S = 0.002
FILLER = "Think about the question, write down every step on a line of its own, check the result, then answer. "


class FullLength:
    """``rlvr`` that ignores the model's end token and always generates ``max_new_tokens``."""

    def __init__(self, context: WorkflowContext) -> None:
        self._context = replace(context, sampling=replace(context.sampling, ignore_end=True))

    async def run(self, episode: Episode) -> Trajectory:
        return await rlvr(Episode(self._context, episode.engine, episode.data))


def compute_score(**_: Any) -> float:
    """Random weights give no useful answer. Different rewards make every group count."""
    return random.random()


def settings_of(case: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    last = options.steps + options.sampled + 1
    shared = {
        "run.root": str(folder / "runs"),
        "run.name": case,
        "trainer.total_steps": last,
        "trainer.profile.steps": [last],
        "eval.before": False,
        "eval.after": False,
    }
    if case == "grpo":
        rows = folder / "prompts.jsonl"
        questions = [f"{place}. {FILLER}" for place in range(64)]
        rows.write_text("".join(json.dumps({"prompt": each, "data_source": "questions"}) + "\n" for each in questions))
        return shared | {
            "model.path": _model_folder(folder / "grpo", options.shape or "qwen2.5-1.5b", options.model),
            "data.train": str(rows),
            "data.max_prompt_tokens": 256,
            "rollout.workflow": f"{__file__}:FullLength",
            "rollout.num_samples_per_prompt": 8,
            "rollout.max_new_tokens": max(4, 512 // options.scale),
            "reward.function": f"{__file__}:compute_score",
            "trainer.num_prompts_per_step": max(2, 32 // options.scale),
        }
    is_real = bool(options.model)
    path = options.model if is_real else _model_folder(folder / "short", options.shape or "smollm2", "")
    random_weights = {"rollout.workflow": f"{__file__}:FullLength", "reward.function": f"{__file__}:compute_score"}
    ahead = {"rollout.max_staleness": 4, "algorithm.old_logprobs": "recompute"}
    return {
        **shared,
        "model.path": path,
        "data.train": "arithmetic",
        "data.task_args": {"style": "words", "max_operand": 99, "operations": ["+", "-"], "num_operands": 3},
        "data.system_prompt": "Answer with the number only.",
        "data.num_train_rows": 4096,
        "data.max_prompt_tokens": 64 if is_real else 256,
        "rollout.num_samples_per_prompt": 16,
        "rollout.max_new_tokens": 8 if is_real else 4,
        "trainer.num_prompts_per_step": max(2, 64 // options.scale),
        "learner.num_minibatches": 2,
        "learner.learning_rate": 1e-5,
        # Without it no answer is right, all rewards are equal, and nothing is trained.
        **({"warm_start.num_steps": 60, "warm_start.learning_rate": 3e-5} if is_real else random_weights),
        **(ahead if case == "async" else {}),
    }


def _model_folder(folder: Path, shape: str, tokenizer_of: str) -> str:
    """A model folder with random weights and a tokenizer."""
    device = default_device()
    build_model(shape, device, default_dtype(device)).save_pretrained(folder)
    tokenizer = load_tokenizer(tokenizer_of) if tokenizer_of and shape != "tiny" else build_tokenizer()
    tokenizer.save_pretrained(folder)
    return str(folder)


class Sampler:
    """Notes what the threads of this process execute. Functions that only wait are counted as waiting."""

    def __init__(self) -> None:
        self.stage = "other"
        self.is_on = False
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """By stage of the trainer, thread and place in the code."""
        self.inside: Counter[tuple[str, str, str]] = Counter()
        """The same for every function of Headwater that is on a thread's stack."""
        self.num_samples: Counter[str] = Counter()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self._thread.join()

    def _run(self) -> None:
        own = threading.get_ident()
        while not self._is_ending:
            time.sleep(SAMPLE_S)
            if not self.is_on:
                continue
            names = {each.ident: each.name for each in threading.enumerate()}
            self.num_samples[self.stage] += 1
            for ident, frame in sys._current_frames().items():
                if ident != own:
                    thread = _kind(names.get(ident, "?"))
                    self.counts[self.stage, thread, _place(frame)] += 1
                    for function in _functions(frame):
                        self.inside[self.stage, thread, function] += 1

    def top(
        self, counts: Counter[tuple[str, str, str]], number: int = 16
    ) -> dict[str, dict[str, list[tuple[str, float]]]]:
        """By stage and thread: the most frequent places, with their share of the stage's samples."""
        found: dict[str, dict[str, list[tuple[str, float]]]] = {}
        for (stage, thread, place), count in counts.most_common():
            places = found.setdefault(stage, {}).setdefault(thread, [])
            if len(places) < number:
                places.append((place, round(count / self.num_samples[stage], 3)))
        return found


def _kind(thread: str) -> str:
    """The name without numbers, so that the threads of a pool count together."""
    return thread.rstrip("0123456789_- ")


def _place(frame: FrameType | None) -> str:
    """The innermost function, and the innermost one of Headwater that called it, with its line."""
    first = _short(frame) if frame is not None else "?"
    while frame is not None and "headwater" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return first
    own = f"{_short(frame)}:{frame.f_lineno}"
    return own if own.startswith(first) else f"{own} > {first}"


def _functions(frame: FrameType | None) -> set[str]:
    """The functions of Headwater on a stack."""
    found = set()
    while frame is not None:
        if "/headwater/" in frame.f_code.co_filename:
            found.add(_short(frame))
        frame = frame.f_back
    return found


def _short(frame: FrameType) -> str:
    path = frame.f_code.co_filename.split("/")
    return f"{'/'.join(path[-2:])}:{frame.f_code.co_name}"


@contextmanager
def _watched(sampler: Sampler, options: argparse.Namespace, kernels: list[dict[str, Any]]) -> Iterator[None]:
    """While this lasts, the recorder's stages are known to ``sampler`` and the profiler gives its tables."""
    stage, step, profiler = Recorder.stage, Recorder.step, learner_module.Profiler

    @contextmanager
    def noted_stage(self: Recorder, name: str, **args: object) -> Iterator[None]:
        outer, sampler.stage = sampler.stage, name
        try:
            with stage(self, name, **args):
                yield
        finally:
            sampler.stage = outer

    def noted_step(self: Recorder, number: int, *args: Any, **kwargs: Any) -> None:
        step(self, number, *args, **kwargs)
        sampler.is_on = options.steps <= number < options.steps + options.sampled

    class Tables(profiler):  # type: ignore[valid-type, misc]
        def finish(self) -> list[Path]:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profile.stop()
            kernels.extend(_rows(self._profile))
            return []

    Recorder.stage, Recorder.step, learner_module.Profiler = noted_stage, noted_step, Tables  # type: ignore
    try:
        yield
    finally:
        Recorder.stage, Recorder.step, learner_module.Profiler = stage, step, profiler  # type: ignore


def _rows(profile: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": each.key[:110],
            "count": each.count,
            "cpu_ms": each.self_cpu_time_total / 1e3,
            "device_ms": getattr(each, "self_device_time_total", 0.0) / 1e3,
        }
        for each in profile.key_averages()
    ]


def run_case(case: str, options: argparse.Namespace) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        settings = settings_of(case, options, Path(folder))
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        config = load_config(None, [*overrides, *options.settings]).config
        made_s, began = time.perf_counter() - began, time.perf_counter()
        sampler, kernels = Sampler(), list[dict[str, Any]]()
        rollout = build_rollout(config, config.model.path)
        try:
            training = build_training(LearnerSpec(config, config.model.path, config.model.path), rollout.tokenizer)
            run = RunDirectory.create(Path(config.run.root), config.run.name)
            run.write_config(to_yaml(config))
            trainer = Trainer(config, rollout, training, run, Display(Console(file=io.StringIO())))
            loaded_s = time.perf_counter() - began
            with sampler, _watched(sampler, options, kernels):
                trainer.fit()
        finally:
            rollout.close()
        steps = [each for each in run.read_metrics() if each["kind"] == "train"]
    times = [{key: value for key, value in each.items() if key.startswith("time/")} for each in steps]
    timed = times[2 : options.steps] or times[: options.steps]
    names = sorted({name for each in timed for name in each})
    median = {name: statistics.median(each.get(name, 0.0) for each in timed) for name in names}
    row = {"case": case, "load_s": loaded_s, "make_model_s": made_s, "median": median, "times": times}
    shown = ("tokens/", "response", "throughput/", "mfu/", "memory/", "rollout_gap/", "reward/mean")
    row["last_timed_step"] = {key: value for key, value in steps[options.steps - 1].items() if key.startswith(shown)}
    row |= {"sampled": sampler.top(sampler.counts), "inside": sampler.top(sampler.inside, 30)}
    row |= {"samples": dict(sampler.num_samples), "kernels": _largest(kernels)}
    _show(row, options.steps)
    return row


def _largest(rows: list[dict[str, Any]], number: int = 40) -> dict[str, list[dict[str, Any]]]:
    """The kernels that took longest, the host functions that took longest, and all calls of the CUDA runtime."""
    runtime = [each for each in rows if each["name"].startswith(("cuda", "cuLaunch", "cuMem"))]
    return {
        "device": sorted(rows, key=lambda each: -each["device_ms"])[:number],
        "host": sorted(rows, key=lambda each: -each["cpu_ms"])[:number],
        "runtime": sorted(runtime, key=lambda each: -each["count"]),
        "most_called": sorted(rows, key=lambda each: -each["count"])[:number],
    }


def _show(row: Mapping[str, Any], num_timed: int) -> None:
    print(f"\n== {row['case']}: loaded in {row['load_s']:.1f} s", flush=True)
    for number, each in enumerate(row["times"], start=1):
        parts = " ".join(f"{key[5:-2]} {each[key]:.3f}" for key in _stages(each))
        print(f"step {number}{'' if number <= num_timed else ' (profiled)'}: {parts}", flush=True)
    print("median: " + " ".join(f"{key[5:-2]} {row['median'][key]:.3f}" for key in _stages(row["median"])))
    for stage, threads in row["sampled"].items():
        print(f"-- stage {stage}: {row['samples'][stage]} samples")
        for thread, places in threads.items():
            for kind, shares in (("at", places), ("in", row["inside"][stage].get(thread, ()))):
                for place, share in shares:
                    is_idle = thread not in ("MainThread", "headwater-engine", "headwater-rollouts") and share > 0.9
                    if share >= 0.015 and not is_idle:
                        print(f"   {thread:<20.20} {kind} {share:6.1%}  {place}")
    for kind, rows in row["kernels"].items():
        print(f"-- profiler, {kind}")
        for each in rows[:24]:
            print(f"   {each['count']:>7} cpu {each['cpu_ms']:9.2f} device {each['device_ms']:9.2f} ms  {each['name']}")


def _stages(times: Mapping[str, float]) -> list[str]:
    """Without the distributions over groups and episodes."""
    return [key for key, value in times.items() if key.count("/") == 1 and value >= 0.0005]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="+", metavar="CASE_OR_KEY=VALUE", help=f"of {', '.join(CASES)}, and settings")
    parser.add_argument("--model", default="", help="folder of SmolLM2-135M; without it, random weights in its shape")
    parser.add_argument("--shape", default="", help="another shape for random weights, such as tiny")
    parser.add_argument("--scale", type=int, default=1, help="divide the work by this (default 1)")
    parser.add_argument("--steps", type=int, default=6, help="undisturbed steps (default 6)")
    parser.add_argument("--sampled", type=int, default=3, help="steps with sampling (default 3)")
    options = parser.parse_args()
    options.settings = [each for each in options.cases if "=" in each]
    cases = [each for each in options.cases if "=" not in each]
    if unknown := set(cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; use {', '.join(CASES)}")
    rows = []
    for case in cases:
        rows.append(run_case(case, options))
        write_record(options.out, default_device(), settings=options.settings, rows=rows)


if __name__ == "__main__":
    main()
