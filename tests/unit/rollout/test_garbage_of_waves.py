"""Garbage is not collected while the short episodes of a wave run, and is collected again afterwards."""

from __future__ import annotations

import asyncio
import gc
import math

import pytest
from rollout.executor_parts import Scripted, ok, one_batch

from headwater.core.errors import RolloutFailed
from headwater.rollout import executor


def seen_in_episodes(**options) -> set[bool]:
    seen: set[bool] = set()

    def outcome(data):
        seen.add(gc.isenabled())
        return ok(data)

    one_batch(Scripted(outcome), **options)
    assert gc.isenabled()
    return seen


def test_only_waves_run_without_collections(monkeypatch):
    monkeypatch.setattr(executor, "_GARBAGE_PUT_OFF_S", math.inf)
    assert seen_in_episodes(in_waves=True) == {False}
    assert seen_in_episodes(in_waves=False) == {True}


def test_after_the_limit_garbage_is_collected_while_episodes_run(monkeypatch):
    monkeypatch.setattr(executor, "_GARBAGE_PUT_OFF_S", 0.0)

    async def outcome(data):
        while not gc.isenabled():  # noqa: ASYNC110  nothing tells when it is enabled
            await asyncio.sleep(0.01)
        return ok(data)

    one_batch(Scripted(outcome), in_waves=True)
    assert gc.isenabled()


def test_a_failed_wave_leaves_it_on():
    def outcome(data):
        raise RolloutFailed("no answer")

    with pytest.raises(RolloutFailed, match="no answer"):
        one_batch(Scripted(outcome), in_waves=True)
    assert gc.isenabled()
