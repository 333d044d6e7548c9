"""Asking memory for what the next kernels read, so that it is in the second-level cache when they start.

The small kernels between a layer's products leave memory idle, and so do the small products themselves. A kernel that
knows what comes next asks for it and goes on: nothing waits for the answer, and asking for too much only wastes room.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_SHARE_MULTIPLE = 128


@dataclass(frozen=True)
class PagedReads:
    """The first ``num_pages`` pages of every row, in the keys and values of one layer."""

    keys: Tensor
    values: Tensor
    page_table: Tensor
    num_pages: int


@dataclass(frozen=True)
class Soon:
    """What is read soon: a weight's first ``max_bytes``, and pages of the cache."""

    weight: Tensor
    max_bytes: int
    pages: PagedReads | None = None


@cache
def supports_prefetch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def share_of(soon: Soon | None, num_programs: int) -> tuple[int, int]:
    """Bytes of the weight to ask for in all, and by each program."""
    if soon is None:
        return 0, 0
    assert soon.weight.is_contiguous(), "only a contiguous weight can be asked for in one piece"
    wanted = min(soon.weight.numel() * soon.weight.element_size(), soon.max_bytes) // 16 * 16
    return wanted, triton.cdiv(wanted, num_programs * _SHARE_MULTIPLE) * _SHARE_MULTIPLE


@triton.jit
def prefetch_share(weight, num_bytes, share, program, ACTIVE: tl.constexpr):
    """Ask for this program's ``share`` of the first ``num_bytes`` of ``weight``."""
    if ACTIVE:
        start = program.to(tl.int64) * share
        prefetch_bytes(weight.to(tl.int64) + start, tl.minimum(num_bytes - start, share).to(tl.int32))


@triton.jit
def prefetch_pages(keys, values, table, row, table_stride, page_bytes, NUM_PAGES: tl.constexpr):
    """Ask for the first pages of ``row``; rows that have fewer ask for the scratch page."""
    for index in tl.static_range(NUM_PAGES):
        page = tl.load(table + row * table_stride + index).to(tl.int64)
        prefetch_bytes(keys.to(tl.int64) + page * page_bytes, page_bytes)
        prefetch_bytes(values.to(tl.int64) + page * page_bytes, page_bytes)


@triton.jit
def prefetch_bytes(address, num_bytes):
    # One thread of the program asks for all of it; scalar code runs in every thread.
    tl.inline_asm_elementwise(
        """{
        .reg .pred asks;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 asks, thread, 0;
        setp.gt.and.s32 asks, $2, 0, asks;
        @asks cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, thread;
        }""",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
