"""Devices and number types: from the names in the config to torch's objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from headwater.config.schema import Config, Dtype
from headwater.core.errors import ModelError
from headwater.models.capture import num_graph_bytes

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability of the first GPUs that compute in bfloat16. Older ones emulate it slowly."""
_UNKNOWN_RAM = 8 * 2**30
"""Free memory assumed where it cannot be measured (not Linux). engine.kv_cache_gib overrides it."""


def resolve_device(name: str, key: str = "model.device") -> torch.device:
    """``auto`` is the current CUDA device if there is one, otherwise the CPU. ``key`` is the setting in messages."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"{key} = {name}: not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"{key} = {name}: not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError(f"{key} = {name}: no CUDA device is available; use cpu or auto")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ModelError(f"{key} = {name}: the last CUDA device is cuda:{last}; use cuda:0 to cuda:{last} or auto")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: str = "auto") -> torch.dtype:
    """``auto`` is bfloat16 if ``device`` is a GPU that computes in it, otherwise float32."""
    if name == "auto":
        return auto_dtype(resolve_device(device))
    if name not in DTYPES:
        raise ModelError(f"model.dtype = {name}: unknown; use one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def auto_dtype(device: torch.device) -> torch.dtype:
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_BFLOAT16
    return torch.bfloat16 if has_bfloat16 else torch.float32


def with_dtype(config: Config) -> Config:
    """The config with the number type that ``model.dtype: auto`` means on this machine.

    It is resolved once, for the learner's device: the engine has the same type wherever it runs.
    """
    if config.model.dtype != "auto":
        return config
    chosen = resolve_dtype(config.model.dtype, config.model.device)
    name = next(name for name, dtype in DTYPES.items() if dtype == chosen)
    return replace(config, model=replace(config.model, dtype=name))


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def sum_in_one_order() -> None:
    """From now on, gradients on a GPU are the same bits every time, in this whole process.

    An operation of torch that has no such kernel then raises an error that names it. ``sums_restored`` ends this.
    """
    os.environ.setdefault(_CUBLAS, ":4096:8")  # torch before 2.13 refuses matrix products without it
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it


@contextmanager
def sums_restored() -> Iterator[None]:
    """At its end, torch sums in the way in which it did before."""
    settings: Any = torch.utils.deterministic
    is_on, fills = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(_CUBLAS)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
        settings.fill_uninitialized_memory = fills
        if workspace is None:
            os.environ.pop(_CUBLAS, None)


def check_float16(config: Config) -> None:
    """Refuse float16 in a process that trains without a GPU. The process that starts a cluster may have none."""
    if config.model.dtype == "float16" and resolve_device(config.model.device).type == "cpu":
        raise ModelError(
            "model.dtype = float16: there is no GPU, and a CPU computes float16 hundreds of times slower than float32; "
            "use auto or float32"
        )


def available_ram(root: Path = Path("/")) -> int:
    """Free memory of the machine, or less if a control group (container, batch system) limits this process.

    ``root`` is the folder that contains ``proc`` and ``sys``.
    """
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        machine = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return _UNKNOWN_RAM
    return max(0, min([machine, *_left_in_groups(root)]))


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can be allocated."""
    return _free_on_gpu(device) if device.type == "cuda" else available_ram()


def free_for_large_tensors(device: torch.device) -> int:
    """Memory of a GPU that can be allocated, without the unused remains of blocks that other tensors are in."""
    return _free_on_gpu(device, torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0))


def _free_on_gpu(device: torch.device, num_unusable: int = 0) -> int:
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    # Unlike the others, this function refuses a device without a number.
    fraction = torch.cuda.get_per_process_memory_fraction(device.index)
    allowed = int(fraction * total) - reserved
    # Memory that torch has reserved but does not use is available too, unless CUDA graphs hold it.
    unused = reserved - torch.cuda.memory_allocated(device) - num_graph_bytes(device) - num_unusable
    return max(0, min(int(free), allowed)) + max(0, unused)


def _left_in_groups(root: Path) -> Iterator[int]:
    """The memory left in each control group of this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # cgroup version 2: a single tree
            names = ("memory.max", "memory.current", "inactive_file")
            tree = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            tree = root / "sys/fs/cgroup/memory"
        else:
            continue
        # A limit also applies to all groups below it. Inside a container the path may not exist, but its root does.
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            left = _left_in(tree / group, *names)
            if left is not None:
                yield left


def _left_in(group: Path, limit_name: str, usage_name: str, cached_name: str) -> int | None:
    try:
        limit, usage = (group / limit_name).read_text().strip(), (group / usage_name).read_text()
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Cached files count as used memory, but the system drops them when memory is needed.
        return None if limit == "max" else int(limit) - int(usage) + int(statistics.get(cached_name, 0))
    except (OSError, ValueError):
        return None  # no such group, or a group without a limit
