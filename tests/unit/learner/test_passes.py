"""Statistics over the optimiser steps of an update, and the device of its passes."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from learner.test_engine import actor, engine, experience

from headwater.learner.engine import ForwardEngine
from headwater.learner.step_sums import mean_stats


def test_a_skipped_step_does_not_hide_those_that_were_taken():
    """The first half of the batch has an advantage that is no number; the second half is a step of its own."""
    data = experience(1)
    data.batch["advantages"][:6] *= math.nan
    stats = actor(engine(num_minibatches=2)).update(data)
    alone = actor(engine()).update(data[6:])
    assert (stats.pop("skipped_steps"), alone.pop("skipped_steps")) == (1, 0)
    assert stats.pop("flops") > alone.pop("flops")  # a skipped step is computed too
    # The engine's log-probs are compared with the learner's at the first step only.
    assert stats == pytest.approx({name: value for name, value in alone.items() if not name.startswith("rollout_gap")})


def test_where_every_step_was_skipped_they_are_shown():
    stats = mean_stats([{"loss": math.nan, "entropy": 2.0, "skipped_steps": 1.0}] * 2)
    assert math.isnan(stats["loss"])
    assert (stats["entropy"], stats["skipped_steps"], stats["optimizer_steps"]) == (2.0, 2.0, 0.0)


def test_passes_use_the_gpu_of_their_engine_in_every_thread(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((threading.get_ident(), device)))
    train_engine = engine()
    assert chosen == []
    monkeypatch.setattr(ForwardEngine, "use_device", _on_second_gpu(ForwardEngine.use_device))
    ForwardEngine(train_engine.module, train_engine.config)
    data = experience(1)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(threading.get_ident).result()
        pool.submit(train_engine.compute, data).result()
        pool.submit(actor(train_engine).update, data).result()
    second = torch.device("cuda", 1)
    assert chosen == [(threading.get_ident(), second), (there, second), (there, second)]


def _on_second_gpu(use_device):
    """``use_device`` of an engine that believes to be on a GPU, which the rest of the pass does not."""

    def call(self) -> None:
        use_device(SimpleNamespace(device=torch.device("cuda", 1)))

    return call
