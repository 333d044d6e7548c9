"""Processor time of an update and of a pass for log-probs without the model: what a GPU waits for.

    python benchmarks/learner_host.py --out benchmarks/results/cpu_learner_host.json

The model is replaced by a single weight, so that what is left is the host's part: selecting and packing rows, building
the tables of attention, choosing the columns of micro-batches, the loss, and statistics. ``lengths`` has the sequences
of ``train_step.py``, and ``groups`` 32 prompts of 120 tokens with 8 samples of 512. The loss and its statistics are
kernels on a GPU. Here their time is that of a CPU, and they are listed separately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from options import parser_of
from record import write_record
from shapes import build_model
from torch import Tensor, nn
from train_step import experience_of, make_trajectory

from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.learner import engine, packing, step_sums
from headwater.learner.actor import Actor
from headwater.learner.optimizer import Optimizer
from headwater.learner.packed_module import PolicyModule
from headwater.learner.packing import LossColumns
from headwater.models.packed_attention import AttentionTables
from headwater.rollout.group import pad_trajectories

CPU = torch.device("cpu")


class StandIn(PolicyModule):
    """Has the outputs of a policy, from one weight."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, 1.0)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pack: packing.Pack) -> Mapping[str, Tensor]:
        self.build_tables(pack)
        values = self.scale * torch.ones(len(pack.targets))
        return dict.fromkeys(self.outputs, values)

    def build_tables(self, pack: packing.Pack) -> None:
        AttentionTables.of(pack.segments, CPU)


PARTS: dict[str, tuple[Any, str]] = {
    "rows of a batch": (DataProto, "__getitem__"),
    "counts": (engine.TrainEngine, "totals"),
    "reading rows": (engine, "read_rows"),
    "planning packs": (engine, "pack_rows"),
    "making packs": (packing, "_pack"),
    "columns to the device": (LossColumns, "__init__"),
    "columns of a micro-batch": (LossColumns, "of"),
    "pack to the device": (packing.Pack, "to"),
    "tables of attention": (StandIn, "build_tables"),
    "loss and statistics (kernels)": (engine.TrainEngine, "_backward"),
    "comparison with rollouts (kernels)": (step_sums.StepSums, "add_gap"),
    "padding (kernels)": (packing.Pack, "padded"),
    "reading statistics": (step_sums.StepSums, "read"),
    "optimiser": (Optimizer, "step"),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="updates whose median is shown (default 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, data in (("lengths", _lengths()), ("groups", _groups())):
        for what in ("update", "logprobs"):
            rows.append({"case": name, "what": what, **_measure(data, what, options.runs)})
            shown = ", ".join(f"{part} {ms:.2f}" for part, ms in rows[-1].items() if isinstance(ms, float))
            print(f"{name}, {what}: {shown}", flush=True)
    write_record(options.out, CPU, unit="milliseconds of processor time", rows=rows)


def _measure(data: DataProto, what: str, runs: int) -> dict[str, float]:
    config = LearnerConfig(max_tokens_per_microbatch=16384)
    actor = Actor(
        engine.TrainEngine(StandIn(build_model("tiny", CPU, torch.float32)), config),
        ppo,
        AlgorithmConfig(old_logprobs="rollout"),
        loss_width=4096,
    )

    def work() -> Any:
        return actor.update(data) if what == "update" else actor.engine.compute(data)

    work()
    taken: list[dict[str, float]] = []
    for _ in range(runs):
        with _timed() as parts:
            began = time.process_time()
            work()
            total = time.process_time() - began
        kernels = sum(seconds for name, seconds in parts.items() if name.endswith("(kernels)"))
        taken.append({"host": total - kernels, **parts})
    names = dict.fromkeys(name for each in taken for name in each)
    return {name: 1e3 * statistics.median(each.get(name, 0.0) for each in taken) for name in names}


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Processor time of the parts, without that of other parts inside them."""
    seconds: dict[str, float] = defaultdict(float)
    inside: list[float] = []
    before = {name: vars(owner)[method] for name, (owner, method) in PARTS.items()}

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            inside.append(0.0)
            began = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                took = time.process_time() - began
                seconds[name] += took - inside.pop()
                if inside:
                    inside[-1] += took

        return call

    for name, (owner, method) in PARTS.items():
        setattr(owner, method, wrapped(name, before[name]))
    try:
        yield seconds
    finally:
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, before[name])


def _lengths() -> DataProto:
    return experience_of(argparse.Namespace(tokens=65536, samples=1, mean=600, longest=4096), 1000)


def _groups() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    trajectories = []
    for _ in range(32):
        prompt = torch.randint(10, 1000, (120,), generator=generator).tolist()
        for sample in range(8):
            response = torch.randint(10, 1000, (512,), generator=generator).tolist()
            trajectories.append(make_trajectory(prompt, response, sample))
    data = pad_trajectories(trajectories, pad_token_id=0)
    advantages = torch.randn(len(data), 1, generator=generator) * data.batch["response_mask"]
    return data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})


if __name__ == "__main__":
    main()
