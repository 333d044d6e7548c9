"""Ranks and engines that share one GPU and talk over NCCL, for tests on a machine that has only one.

NCCL refuses two members on one GPU, except if it takes them for members on two machines, which then talk over sockets.
``tests/gpu/test_nccl_cuda.py`` sets ``HEADWATER_TEST_ONE_GPU`` for the processes that it starts.
"""

from __future__ import annotations

import os

VARIABLE = "HEADWATER_TEST_ONE_GPU"


def is_shared() -> bool:
    return VARIABLE in os.environ


def as_machine(name: str) -> dict[str, str]:
    """The environment of a process that NCCL shall take for a machine of this name."""
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if is_shared() else {}


def of_rank(rank: int) -> dict[str, str]:
    """What tells a rank which GPU is its own."""
    return {"LOCAL_RANK": "0" if is_shared() else str(rank), **as_machine(f"rank-{rank}")}
