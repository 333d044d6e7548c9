"""Runs a function on two gloo ranks, each a process of its own, and gives back what they returned."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_LIMIT_S = 200


def on_two_ranks(function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """``function(rank, *args)`` on both; what they return goes through ``torch.save``."""
    context = mp.get_context("spawn")
    processes = [context.Process(target=_run, args=(rank, folder, function, args)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_LIMIT_S)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(2)]


def _run(rank: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        torch.save(function(rank, *args), folder / f"result_{rank}.pt")
    finally:
        dist.destroy_process_group()
