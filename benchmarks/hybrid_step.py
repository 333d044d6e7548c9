"""Whole steps of an engine and a learner that share one GPU: time by stage, and bytes moved over the bus.

    python benchmarks/hybrid_step.py --shape qwen2.5-7b --cases planned forced

The parts are those of a run: the embedded engine, the learner, publication with checksums, and the memory plan with its
turns. A step generates all responses, trains on them and publishes the weights. Cases:

- ``plain``: everything stays on the GPU (``learner.residency=resident``), and there is no plan.
- ``planned``: the plan chooses (``learner.residency=auto``, the default).
- ``forced``: a plan with ``learner.offload_during_rollout`` and ``learner.offload_optimizer``.

``offload`` is the time in which nothing but moving memory happens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from options import add_shape, add_work, parser_of
from record import write_record
from shapes import build_model, default_device, default_dtype, make_prompts, make_requests

from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.core.data_proto import DataProto
from headwater.core.errors import ConfigError
from headwater.core.memory_plan import MemoryPlan
from headwater.core.records import Trajectory
from headwater.core.requests import ModelRequest, ModelResponse
from headwater.engine.engine import Engine
from headwater.engine.kv_cache import free_bytes
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.learner import LocalLearner
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule
from headwater.models.builtin.tiny import build_tokenizer
from headwater.models.device import available_ram
from headwater.models.memory_sizes import ModelSize
from headwater.models.virtual_memory import is_supported, mapped_bytes
from headwater.rollout.group import pad_trajectories
from headwater.trainer.memory_setup import Models, budget_of, plan_memory, planned
from headwater.trainer.memory_turns import MemoryTurns, releases_cache
from headwater.weights.publish import publish

CASES = {
    "plain": ["learner.residency=[resident]"],
    "planned": ["learner.residency=[auto]"],
    "forced": ["learner.residency=[auto]", "learner.offload_during_rollout=true", "learner.offload_optimizer=true"],
}
GIB = 2**30
STAGES = ("offload", "generate", "experience", "train", "publish")


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    add_work(parser, prompt_tokens=128, new_tokens=512, samples=8)
    parser.add_argument("--cases", nargs="+", choices=CASES, required=True)
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step (default 32)")
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens per pass (default 16384)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one that is not (default 2)")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank (default 0: all weights)")
    parser.add_argument("--plain-activations", action="store_true", help="do not checkpoint activations")
    options = parser.parse_args()
    device = default_device()
    rows = []
    for case in options.cases:
        rows.append(_measure(case, options, device) if len(options.cases) == 1 else _in_own_process(case))
        write_record(options.out, device, shape=options.shape, rows=rows)


def _in_own_process(case: str) -> dict[str, Any]:
    """The row of one case. Every case begins with all of the GPU and of the main memory."""
    given = sys.argv[1:]
    start = given.index("--cases")
    others = [
        *given[:start],
        *given[start + 1 + len(list(takewhile(lambda each: each in CASES, given[start + 1 :]))) :],
    ]
    if "--out" in others:
        del others[others.index("--out") : others.index("--out") + 2]
    with TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        subprocess.run([sys.executable, __file__, *others, "--cases", case, "--out", str(out)], check=True)
        row: dict[str, Any] = json.loads(out.read_text())["rows"][0]
    return row


def _measure(case: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    config = _config(case, options, device)
    began = time.perf_counter()
    try:
        plan = _plan(config, options, device)
    except ConfigError as error:
        print(f"{case}: refused: {error}", flush=True)
        return {"case": case, "refused": str(error)}
    if plan is not None:
        print(f"{case}:\n{plan.table()}", flush=True)
    run = _Run(config, plan, options, device)
    try:
        print(f"{case}: built in {time.perf_counter() - began:.1f} s", flush=True)
        steps = [run.step(number) for number in range(1, options.steps + 2)]
    finally:
        run.close()
    timed = steps[1:]
    row = {
        "case": case,
        "plan": plan.ways if plan is not None else {},
        "first_step_s": steps[0]["step_s"],
        "step_s": statistics.median(step["step_s"] for step in timed),
        "offload_s": statistics.median(step["offload_s"] for step in timed),
        "steps": steps,
    }
    print(f"{case}: step {row['step_s']:.2f} s, of which moving {row['offload_s']:.2f} s", flush=True)
    return row


def _config(case: str, options: argparse.Namespace, device: torch.device) -> Config:
    settings = [
        f"model.dtype={str(default_dtype(device)).removeprefix('torch.')}",
        f"model.device={device.type}",
        f"data.max_prompt_tokens={options.prompt_tokens}",
        f"rollout.max_new_tokens={options.new_tokens}",
        f"rollout.num_samples_per_prompt={options.samples}",
        f"trainer.num_prompts_per_step={options.prompts}",
        f"learner.max_tokens_per_microbatch={options.microbatch}",
        f"learner.checkpoint_activations={str(not options.plain_activations).lower()}",
        "learner.skip_zero_advantages=false",
        f"lora.rank={options.lora_rank}",
        *(["engine.kv_cache_gib=0.25"] if device.type == "cpu" else []),
    ]
    return load_config(None, [*settings, *CASES[case]]).config


def _plan(config: Config, options: argparse.Namespace, device: torch.device) -> MemoryPlan | None:
    if device.type == "cpu" or config.learner.residency == ("resident",):
        return None
    size = ModelSize.of(build_model(options.shape, torch.device("meta"), default_dtype(device)))
    budget = budget_of(config, free_bytes(device), available_ram())
    return plan_memory(config, Models(size, {}), budget, can_discard=is_supported(device))


class _Run:
    """An engine, a learner, and the turns they take."""

    def __init__(
        self, config: Config, plan: MemoryPlan | None, options: argparse.Namespace, device: torch.device
    ) -> None:
        self._options, self._device = options, device
        built = planned(config, plan)
        dtype = default_dtype(device)
        self.engine = Engine(
            build_model(options.shape, device, dtype), build_tokenizer(), built.engine, shares_device=True
        )
        if releases_cache(config, plan):
            self.engine.sleep(("kv_cache",))
        model = build_model(options.shape, device, dtype if built.lora.rank else torch.float32)
        module = PolicyModule(model, 1.0)
        if built.lora.rank:
            add_adapters(model, built.lora, seed=0)
        train = TrainEngine(module, built.learner, compute_dtype=dtype)
        actor = Actor(train, ppo, built.algorithm, loss_width=options.new_tokens)
        self._train = train
        self.learner = LocalLearner(built, actor, build_tokenizer())
        self.turns = MemoryTurns(config, plan, self.learner, self.engine, self._stage)
        self._seconds: dict[str, float] = {}
        self._moved = 0
        publish(self.learner, self.engine, 1)

    def step(self, number: int) -> dict[str, Any]:
        self._seconds = dict.fromkeys(STAGES, 0.0)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        requests = self._requests(number)
        began = time.perf_counter()
        with self.turns.generating(), self._stage("generate"):
            responses = self.engine.generate(requests)
        self.turns.train()
        with self._stage("experience"):
            data = _experience(requests, responses)
        with self._stage("train"):
            stats = self.learner.update(data)
        self.turns.publishing()
        with self._stage("publish"):
            publish(self.learner, self.engine, number + 1)
        seconds = time.perf_counter() - began
        parts_moved = self._train.residency, self._train.frozen, self._train.optimizer
        moved = sum(each.num_bytes_moved for each in parts_moved)
        row: dict[str, Any] = {"step_s": seconds, **{f"{name}_s": self._seconds[name] for name in STAGES}}
        row["other_s"] = seconds - sum(self._seconds.values())
        row["moved_gb"] = (moved - self._moved) / 1e9
        row["mfu"] = stats.get("mfu/actor", 0.0)
        row["allocated_gib"] = (torch.cuda.memory_allocated() + mapped_bytes()) / GIB if self._on_gpu else 0.0
        row["torch_peak_gib"] = torch.cuda.max_memory_allocated() / GIB if self._on_gpu else 0.0
        row |= self.turns.take_report()
        self._moved = moved
        parts = ", ".join(f"{name} {row[f'{name}_s']:.2f}" for name in (*STAGES, "other"))
        memory = ", ".join(f"{key} {value:.1f}" for key, value in row.items() if "gib" in key)
        print(f"  step {number}: {seconds:.2f} s: {parts}; moved {row['moved_gb']:.1f} GB; {memory}", flush=True)
        return row

    def close(self) -> None:
        self.engine.close()
        self.learner.close()

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def _requests(self, run: int) -> list[ModelRequest]:
        options = self._options
        prompts = make_prompts(options.prompts, options.prompt_tokens, self.engine.limits.vocab_size, seed=run)
        return make_requests(prompts, options.samples, options.new_tokens, run)


def _experience(requests: list[ModelRequest], responses: list[ModelResponse]) -> DataProto:
    trajectories = []
    for request, response in zip(requests, responses, strict=True):
        _, prompt, sample = request.request_id.split("/")
        num_prompt, num_new = len(request.input_tokens), len(response.output_tokens)
        trajectories.append(
            Trajectory(
                uid=prompt,
                sample=int(sample),
                tokens=(*request.input_tokens, *response.output_tokens),
                prompt_length=num_prompt,
                loss_mask=(0,) * num_prompt + (1,) * num_new,
                logprobs=(0.0,) * num_prompt + tuple(response.output_logprobs),
                versions=(-1,) * num_prompt + tuple(response.output_versions),
                reward=0.0,
                stop_reason="length",
            )
        )
    data = pad_trajectories(trajectories, pad_token_id=0)
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(data), 1, generator=generator) * data.batch["response_mask"]
    return data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})


if __name__ == "__main__":
    main()
