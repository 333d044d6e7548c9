"""Launching a kernel before the one it depends on has ended (programmatic dependent launch, from Hopper on).

A kernel launched with ``launch_options(True)`` may start while its predecessor still runs, so it must call
``wait_for_predecessor`` before it touches anything an earlier kernel writes or reads. Every program of it must: then a
kernel that has ended implies that all before it have ended too, however early each let the next one start.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(dependent: bool) -> dict[str, bool]:
    """Keyword arguments of a kernel launch, ``DEPENDENT`` for the kernel itself among them."""
    # The interpreter does not know the launch option, so it is left out where it is not asked for.
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_successor_start(DEPENDENT: tl.constexpr):
    """The successor waits for this kernel's end by itself; this only lets it take its place on the device."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
