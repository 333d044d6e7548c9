"""The memory that one rank needs for an update on a long pack, if 1, 2 or 4 ranks compute the pack together.

    python benchmarks/context_parallel.py --out benchmarks/results/context_parallel_cpu.json
    python benchmarks/context_parallel.py --model tiny:qwen3 --rows 1 --length 32768 \
        --out benchmarks/results/context_parallel_32k_cpu.json

Ranks are processes of this machine and use gloo. The peak is that of the resident memory, beyond what a rank held
before the update: activations, logits, gathered layers and gradients.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from options import parser_of
from record import write_record
from torch.multiprocessing.spawn import spawn

from headwater.config.load import load_config
from headwater.core.data_proto import DataProto
from headwater.core.records import Trajectory
from headwater.learner.build import LearnerSpec, build_learner
from headwater.learner.held import held_by
from headwater.rollout.group import pad_trajectories

PROMPT_TOKENS = 16
NUM_RANKS = (1, 2, 4)


def batch_of(num_rows: int, length: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    rows = [
        Trajectory(
            uid=f"row{row}",
            sample=0,
            tokens=tuple(torch.randint(6, 500, (length,), generator=generator).tolist()),
            prompt_length=PROMPT_TOKENS,
            loss_mask=(0,) * PROMPT_TOKENS + (1,) * (length - PROMPT_TOKENS),
            logprobs=(0.0,) * PROMPT_TOKENS + (-1.0,) * (length - PROMPT_TOKENS),
            versions=(-1,) * PROMPT_TOKENS + (0,) * (length - PROMPT_TOKENS),
            reward=1.0,
            stop_reason="stop",
        )
        for row in range(num_rows)
    ]
    data = pad_trajectories(rows, pad_token_id=0)
    mask = data.batch["response_mask"]
    columns = {"old_logprobs": data.batch["rollout_logprobs"], "advantages": mask * 1.0}
    return data.with_columns(tensors=columns, meta_info={"version": 0})


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(rank: int, num_ranks: int, model: str, num_rows: int, length: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    settings = [
        *(f"model.path={model}", f"learner.context_parallel={num_ranks}", "model.device=cpu", "model.dtype=float32"),
        *(f"learner.max_tokens_per_microbatch={num_rows * length}", f"rollout.max_new_tokens={length - PROMPT_TOKENS}"),
        f"data.max_prompt_tokens={PROMPT_TOKENS}",
    ]
    learner = build_learner(LearnerSpec(load_config("quickstart", settings).config, model, model))
    learner.update(batch_of(2, 2 * PROMPT_TOKENS))
    data = batch_of(num_rows, length)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, began = resident("VmRSS"), time.monotonic()
    stats = learner.update(data)
    result = {
        "peak_mib": (resident("VmHWM") - before) / 2**20,
        "update_s": time.monotonic() - began,
        "parameter_mib": sum(held_by(each).nbytes for each in learner.actor.engine.module.parameters()) / 2**20,
        "loss": stats["actor/loss"],
        "grad_norm": stats["actor/grad_norm"],
    }
    results: list[Any] = [None] * num_ranks
    dist.all_gather_object(results, result)
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="tiny:qwen3-small", help="(default tiny:qwen3-small)")
    parser.add_argument("--rows", type=int, default=32, help="sequences in the pack (default 32)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default 512)")
    options = parser.parse_args()
    # Freed memory goes back to the system at once, so that the peak is what was in use.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    by_ranks = {}
    for num_ranks in NUM_RANKS:
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, (num_ranks, options.model, options.rows, options.length, folder), nprocs=num_ranks)
            by_ranks[num_ranks] = torch.load(f"{folder}/results.pt", weights_only=False)
        peaks = ", ".join(f"{each['peak_mib']:.0f}" for each in by_ranks[num_ranks])
        print(f"{num_ranks} ranks: peak {peaks} MiB", flush=True)
    write_record(
        options.out, torch.device("cpu"), model=options.model, tokens=options.rows * options.length, ranks=by_ranks
    )


if __name__ == "__main__":
    main()
