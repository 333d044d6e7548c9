"""How much memory may still be taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

_UNKNOWN_RAM = 8 * 2**30
"""Not Linux: assume an ordinary laptop; engine.kv_cache_gib says otherwise."""


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use can be had as well.
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_ram()


def available_ram(root: Path = Path("/")) -> int:
    """What the machine has left, or less where a container or a batch system allows this process less.

    ``root`` is where ``proc`` and ``sys`` are.
    """
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        machine = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return _UNKNOWN_RAM
    return max(0, min([machine, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left to each control group above this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree for everything
            names = ("memory.max", "memory.current", "inactive_file")
            tree = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            tree = root / "sys/fs/cgroup/memory"
        else:
            continue
        # A limit holds for everything below it. Inside a container the path may not exist, but its top does.
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            left = _left_in(tree / group, *names)
            if left is not None:
                yield left


def _left_in(group: Path, limit_name: str, usage_name: str, cached_name: str) -> int | None:
    try:
        limit, usage = (group / limit_name).read_text().strip(), (group / usage_name).read_text()
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that were read lately count as used, and are dropped as soon as room is needed.
        return None if limit == "max" else int(limit) - int(usage) + int(statistics.get(cached_name, 0))
    except (OSError, ValueError):
        return None  # no such group, or one without a limit of its own
