"""What leaves the device before each phase of a step, in which order, and what is left alone."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest

from headwater.config.load import load_config
from headwater.core.capabilities import Capabilities, EngineStatus
from headwater.core.errors import ConfigError, MemoryRefused, RolloutFailed
from headwater.core.interpreter import Interrupts
from headwater.core.memory_plan import MOVED, RELEASED, RESIDENT, Budget, MemoryPlan, Way
from headwater.trainer.memory_turns import MemoryTurns, releases_cache


class Watched:
    """Stands for the engine and the learner, and notes their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.needs_weights = False
        self.capabilities = Capabilities(discards_weights=True)

    def status(self) -> EngineStatus:
        return EngineStatus(version=0, num_running=0, num_waiting=0, needs_weights=self.needs_weights)

    def __getattr__(self, name: str):
        return lambda *args: self.calls.append(" ".join([name, *(str(each) for tags in args for each in tags)]))

    @contextmanager
    def stage(self, name: str):
        self.calls.append(f"[{name}")
        yield
        self.calls.append("]")


def turns(watched: Watched, *settings: str, **ways: str) -> MemoryTurns:
    config = load_config(None, ["model.device=cpu", *settings]).config
    every = dict.fromkeys(("weights", "kv_cache", "parameters", "optimizer"), RESIDENT) | ways
    plan = MemoryPlan({tag: Way(way, 1, 1) for tag, way in every.items()}, Budget(100, 100)) if ways else None
    return MemoryTurns(config, plan, watched, watched, watched.stage)


def a_step(each: MemoryTurns, watched: Watched) -> list[str]:
    with each.generating():
        watched.calls.append("generate")
    each.train()
    watched.calls.append("train")
    each.publishing()
    watched.calls.append("publish")
    return watched.calls


def test_a_run_that_fits_moves_nothing():
    for ways in ({}, {"weights": RESIDENT}):
        watched = Watched()
        assert a_step(turns(watched, **ways), watched) == ["generate", "train", "publish"]


def test_the_engine_gives_its_memory_to_training():
    watched = Watched()
    assert a_step(turns(watched, kv_cache=RELEASED, weights=RELEASED), watched) == [
        "[offload", "wake kv_cache", "]", "generate", "[offload", "sleep kv_cache", "]",
        "[offload", "discard_weights", "]", "train", "publish",
    ]  # fmt: skip


def test_weights_that_are_gone_are_not_discarded_again():
    watched = Watched()
    watched.needs_weights = True
    turns(watched, weights=RELEASED).train()
    assert not watched.calls


@pytest.mark.parametrize("ways", [{}, {"parameters": MOVED, "kv_cache": RELEASED}], ids=["told", "planned"])
def test_a_learner_that_leaves_is_copied_while_its_weights_are_published(ways):
    watched = Watched()
    each = turns(watched, *([] if ways else ["learner.offload_during_rollout=true"]), **ways)
    assert a_step(each, watched) == [
        "[offload", "offload", "wake kv_cache", "]", "generate", "[offload", "sleep kv_cache",
        "onload", "]", "train", "prepare_offload", "publish",
    ]  # fmt: skip


def test_everything_returns_after_a_failed_generation():
    watched = Watched()
    with pytest.raises(ZeroDivisionError), turns(watched, parameters=MOVED, kv_cache=RELEASED).generating():
        raise ZeroDivisionError
    assert [call for call in watched.calls if not call.startswith(("[", "]"))][-2:] == ["sleep kv_cache", "onload"]


def test_the_learner_returns_even_if_the_engine_does_not_answer():
    watched = Watched()

    def sleep(tags):
        raise RolloutFailed("the engine has ended")

    watched.sleep = sleep
    with pytest.raises(RolloutFailed), turns(watched, parameters=MOVED, kv_cache=RELEASED).generating():
        pass
    assert "onload" in watched.calls


def test_an_interrupt_waits_until_the_learner_has_moved():
    watched, interrupts = Watched(), Interrupts(lambda doing: None)

    @contextmanager
    def stage(name: str):
        with interrupts.deferred("moving"):
            yield

    def offload():
        os.kill(os.getpid(), signal.SIGINT)
        watched.calls.append("offload")

    watched.stage, watched.offload = stage, offload
    each = turns(watched, parameters=MOVED, kv_cache=RELEASED)
    with pytest.raises(KeyboardInterrupt), interrupts.installed(), each.generating():
        watched.calls.append("generate")
    assert watched.calls == ["offload", "wake kv_cache", "sleep kv_cache", "onload"]


def test_the_order_to_offload_also_releases_the_cache():
    config = load_config(None, ["model.device=cpu"]).config
    assert not releases_cache(config, None)
    assert releases_cache(replace(config, learner=replace(config.learner, offload_during_rollout=True)), None)


def test_a_plan_that_the_engine_cannot_follow_is_refused():
    watched = Watched()
    watched.capabilities = Capabilities()
    turns(watched, kv_cache=RELEASED)
    with pytest.raises(ConfigError, match=r"use learner\.residency=\[resident\]"):
        turns(watched, weights=RELEASED)


def test_an_engine_on_a_cpu_does_not_discard_its_weights(tiny_engine):
    assert not tiny_engine.capabilities.discards_weights
    with pytest.raises(MemoryRefused, match=r"engine\.keep_addresses"):
        tiny_engine.discard_weights()
    assert not tiny_engine.status().needs_weights


@pytest.fixture
def tiny_engine():
    from headwater.config.schema import EngineConfig
    from headwater.engine.engine import Engine

    engine = Engine.load("tiny:qwen3", EngineConfig(kv_cache_gib=0.01), device="cpu")
    yield engine
    engine.close()
