"""How long training pauses for a checkpoint: written in the background from a copy, and waited for.

    python benchmarks/checkpoint_pause.py --out benchmarks/results/checkpoint_pause_tiny_cpu.json
    python benchmarks/checkpoint_pause.py --shape qwen2.5-1.5b --out benchmarks/results/checkpoint_pause_1.5b_h200.json

The pause is the time in which the loop cannot continue: until ``save`` returns, plus what the next update waits for the
copy to main memory. Between the two lies ``--generate-s``, in which a run would generate the next batch. The first
checkpoint also allocates the memory of the copy and is listed separately.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from options import add_shape, parser_of
from record import write_record
from shapes import build_model, default_device, default_dtype

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.load import load_config
from headwater.core.data_proto import DataProto
from headwater.core.records import Trajectory
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.learner import LocalLearner
from headwater.learner.packed_module import PolicyModule
from headwater.models.load import load_tokenizer
from headwater.rollout.group import pad_trajectories
from headwater.rollout.snapshot import RolloutSnapshot
from headwater.trainer.checkpoint import Checkpoints, TrainerState

GIB = 2**30
NUM_TOKENS = 64


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--generate-s", type=float, default=1.0, help="time between saving and the next update")
    parser.add_argument(
        "--runs", type=int, default=3, help="checkpoints in the background, after the first (default 3)"
    )
    parser.add_argument("--waits", type=int, default=1, help="checkpoints that are waited for (default 1)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder of temporary files)")
    options = parser.parse_args()
    device = torch.device(options.device) if options.device else default_device()
    learner, batch = make_learner(options.shape, device)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-pause-", dir=options.folder))
    try:
        first_wait = options.runs + 1
        rows = [measure(learner, batch, folder, number, options.generate_s) for number in range(first_wait)]
        waits = [waited(learner, batch, folder, number) for number in range(first_wait, first_wait + options.waits)]
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / GIB
    finally:
        learner.close()
        shutil.rmtree(folder, ignore_errors=True)
    pause = sorted(row["pause_s"] for row in rows[1:])[len(rows[1:]) // 2]
    wait = sorted(waits)[len(waits) // 2] if waits else None
    print(
        f"{options.shape} on {device.type}: {size:.1f} GiB; training pauses {pause:.2f} s, the first time "
        f"{rows[0]['pause_s']:.2f} s"
    )
    print(f"written in {rows[-1]['written_s']:.1f} s in the background")
    if wait is not None:
        print(f"without the background, training waits {wait:.1f} s")
    write_record(
        options.out, device, shape=options.shape, checkpoint_gib=size, generate_s=options.generate_s, background=rows,
        waited_s=waits, pause_median_s=pause, waited_median_s=wait,
    )  # fmt: skip


def make_learner(shape: str, device: torch.device) -> tuple[LocalLearner, DataProto]:
    config = load_config("quickstart").config
    model = build_model(shape, device, torch.float32)
    engine = TrainEngine(
        PolicyModule(model, 1.0), config.learner, compute_dtype=default_dtype(device), device=device
    )  # fmt: skip
    actor = Actor(engine, ppo, config.algorithm, loss_width=NUM_TOKENS)
    learner = LocalLearner(config, actor, load_tokenizer("tiny:qwen3"))
    batch = pad_trajectories([_trajectory(sample) for sample in range(4)], 0)
    update(learner, batch)  # AdamW has averages from its first step on
    return learner, batch


def _trajectory(sample: int) -> Trajectory:
    tokens = torch.randint(10, 500, (NUM_TOKENS,), generator=torch.Generator().manual_seed(sample))
    mask = (0,) * (NUM_TOKENS // 2) + (1,) * (NUM_TOKENS // 2)
    return Trajectory(
        uid="row", sample=sample, tokens=tuple(tokens.tolist()), prompt_length=NUM_TOKENS // 2, loss_mask=mask,
        logprobs=(0.0,) * NUM_TOKENS, versions=tuple(each - 1 for each in mask), reward=0.0, stop_reason="stop",
    )  # fmt: skip


def update(learner: LocalLearner, batch: DataProto) -> None:
    learner.actor.engine.train_step(batch, _negative_log_likelihood)
    _synchronize(learner)


def _negative_log_likelihood(outputs: Mapping[str, torch.Tensor], batch: DataProto) -> PolicyLoss:
    return PolicyLoss(-outputs["logprobs"])


def _synchronize(learner: LocalLearner) -> None:
    if learner.actor.engine.device.type == "cuda":
        torch.cuda.synchronize(learner.actor.engine.device)


def measure(learner: LocalLearner, batch: DataProto, folder: Path, number: int, generate_s: float) -> dict[str, float]:
    checkpoints = Checkpoints(folder, keep=1)
    began = time.perf_counter()
    checkpoints.save(_state(number), learner, in_background=True)
    returned = time.perf_counter()
    time.sleep(generate_s)
    resumed = time.perf_counter()
    learner.settle()
    settled = time.perf_counter()
    update(learner, batch)
    checkpoints.settle()
    row = {
        "pause_s": returned - began + settled - resumed,
        "save_returned_s": returned - began,
        "update_waited_s": settled - resumed,
        "written_s": time.perf_counter() - began,
    }
    print(f"checkpoint {number}: " + ", ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
    return row


def waited(learner: LocalLearner, batch: DataProto, folder: Path, number: int) -> float:
    began = time.perf_counter()
    Checkpoints(folder, keep=1).save(_state(number), learner)
    seconds = time.perf_counter() - began
    update(learner, batch)
    return seconds


def _state(step: int) -> TrainerState:
    return TrainerState(step, RolloutSnapshot(cursor={}, ledger={}), warm_started=True)


if __name__ == "__main__":
    main()
