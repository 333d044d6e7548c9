"""Which device an engine runs on, and what is refused before a run starts."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from headwater.backends import BACKENDS, BackendContext, engine_device, fleet, missing_capabilities
from headwater.backends.fleet import check_weight_link, devices_of_servers
from headwater.backends.native.engine import NativeEngine
from headwater.config.load import load_config
from headwater.config.schema import EngineConfig
from headwater.core.capabilities import Capabilities
from headwater.core.errors import ConfigError
from headwater.observe.spans import Spans
from headwater.trainer.rollout_setup import make_engine

EVERYTHING = Capabilities()
LIMIT_S = 120.0


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that this machine has that many GPUs."""

    def pretend(count: int, *, num_ranks: int = 1) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))

    return pretend


def test_auto_is_a_gpu_that_the_learner_does_not_use(gpus):
    gpus(0)
    assert engine_device("auto", "auto") == ("cpu", True)
    gpus(1)
    assert engine_device("auto", "auto") == ("cuda:0", True)
    assert engine_device("auto", "cpu") == ("cpu", True), "a learner on the CPU was asked for, so no GPU is taken"
    gpus(4)
    assert engine_device("auto", "auto") == ("cuda:3", False)
    assert engine_device("auto", "cuda:3") == ("cuda:2", False)
    gpus(4, num_ranks=3)
    assert engine_device("auto", "auto") == ("cuda:3", False)
    gpus(4, num_ranks=4)
    assert engine_device("auto", "auto") == ("cuda:0", True), "every GPU has a rank"


def test_a_named_device_is_used_and_known_to_be_shared_or_not(gpus):
    gpus(2)
    assert engine_device("cuda:1", "auto") == ("cuda:1", False)
    assert engine_device("cuda", "cuda:0") == ("cuda:0", True)
    assert engine_device("cpu", "cuda:0") == ("cpu", False)
    for wrong in ("cuda:2", "tpu"):
        with pytest.raises(ConfigError, match=f"rollout.device = {wrong}: "):
            engine_device(wrong, "auto")


def test_what_an_engine_cannot_do_is_named_with_key_and_remedy():
    def problems(*overrides, replays=False, **missing):
        config = load_config(None, list(overrides)).config
        assert missing_capabilities(config, EVERYTHING, replays=replays) == []
        return missing_capabilities(config, replace(EVERYTHING, **missing), replays=replays)

    found = [
        problems("engine.deterministic=true", seeded_sampling=False),
        problems(replays=True, seeded_sampling=False),
        problems("rollout.max_staleness=1", per_token_versions=False),
        problems("learner.offload_during_rollout=true", memory_tags=("weights",)),
        problems("engine.update_mode=in_flight", update_modes=("interrupt", "drain")),
    ]
    keys = ["engine.deterministic = true", "rollout.backend = embedded", "rollout.max_staleness = 1"]
    keys += ["learner.offload_during_rollout = true", "engine.update_mode = in_flight"]
    assert [len(each) for each in found] == [1] * 5
    for [problem], key in zip(found, keys, strict=True):
        assert problem.startswith(f"{key}: ")
    assert problems(update_modes=("drain",)) == [], "an engine with a single mode does not read the setting"


class Unstarted:
    """A backend that must be refused before it is created."""

    declared_capabilities = replace(EVERYTHING, per_token_versions=False)

    @classmethod
    def from_context(cls, context):
        raise AssertionError("a model would be loaded")


def test_a_backend_is_refused_before_it_is_started(monkeypatch):
    def refusal(*overrides):
        config = load_config(None, [f"rollout.backend={__file__}:Unstarted", *overrides]).config
        monkeypatch.setattr(BACKENDS, "resolve", lambda name: Unstarted)
        with pytest.raises(ConfigError) as caught:
            make_engine(BackendContext(config, "tiny:qwen3", None, Spans()))
        return str(caught.value)

    assert "does not tell which version produced a token" in refusal("rollout.max_staleness=1")
    assert "has no method load(model_path, ...); use rollout.placement=colocated" in refusal(
        "rollout.placement=disaggregated"
    )


def test_classes_state_what_their_engines_can_do():
    for name, (model, takes_media) in product(
        ("embedded", "hf"), {"tiny:qwen3": False, "tiny:qwen2_5_vl": True}.items()
    ):
        backend = BACKENDS.resolve(name)
        engine = backend.load(model, EngineConfig(kv_cache_gib=0.02), device="cpu")
        try:
            assert engine.capabilities == replace(backend.declared_capabilities, media=takes_media)
        finally:
            engine.close()


def test_the_devices_of_servers(gpus):
    def devices(*overrides: str) -> list[tuple[str, ...]]:
        return devices_of_servers(load_config(None, ["rollout.placement=disaggregated", *overrides]).config)

    gpus(4)
    assert devices("rollout.device=cpu", "rollout.launch.num_servers=3") == [("cpu",)] * 3
    two = "rollout.launch.num_servers=2"
    assert devices(two, "rollout.launch.devices=[cuda:2, cuda:1]") == [("cuda:2",), ("cuda:1",)]
    pairs = [two, "rollout.backend=vllm", "rollout.launch.tensor_parallel=2"]
    each = "rollout.launch.devices=[cuda:0, cuda:1, cuda:2, cuda:3]"
    assert devices(*pairs, each) == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]


def test_nccl_has_a_gpu_for_every_rank_and_every_server(gpus):
    def refusal(*overrides: str) -> str:
        nccl = ("rollout.weight_transfer=collective", "rollout.weight_link=nccl")
        config = load_config(None, ["rollout.placement=disaggregated", *nccl, *overrides]).config
        try:
            check_weight_link(config)
        except ConfigError as error:
            return str(error)
        return ""

    gpus(0)
    assert "rollout.weight_link = nccl: NCCL sends from GPU to GPU, and the learner uses none" in refusal()
    running = ("rollout.backend=native", "rollout.servers=[http://127.0.0.1:1]")
    assert "no CUDA device is available); use rollout.weight_link=gloo" in refusal(*running)
    gpus(1)
    assert "a server would share cuda:0 with the learner; use rollout.weight_link=gloo" in refusal()
    assert not refusal(*running), "their GPUs are not known"
    gpus(3)
    assert not refusal("rollout.launch.num_servers=2")
    assert "several would share cuda:2; use rollout.weight_link=gloo, or lower" in refusal(
        "rollout.launch.num_servers=3"
    )
    gpus(3, num_ranks=2)
    assert "share cuda:1 with the learner" in refusal("rollout.launch.devices=[cuda:1]")
    assert not refusal()


def test_weights_are_sent_to_a_server_as_the_settings_say(monkeypatch):
    given = {}

    class Told(Exception):
        pass

    def note(self, place, **options) -> None:
        given.update(options)
        raise Told

    monkeypatch.setattr(NativeEngine, "__init__", note)
    for settings, expected in [
        (["rollout.weight_transfer=collective", "rollout.weight_encoding=delta"], ("collective", "gloo", "delta", "")),
        (["rollout.weight_transfer=collective", "rollout.weight_link=nccl"], ("collective", "nccl", "plain", "")),
        (["rollout.weight_transfer=file", "rollout.weight_folder=/shared"], ("file", "gloo", "plain", "/shared")),
    ]:
        settings = ["rollout.backend=native", "rollout.servers=[http://127.0.0.1:1]", *settings]
        with pytest.raises(Told):
            NativeEngine.connect(
                "http://127.0.0.1:1", BackendContext(load_config(None, settings).config, "", None, Spans())
            )
        assert tuple(given[name] for name in ("transfer", "link", "encoding", "weight_folder")) == expected


def test_an_interrupted_start_of_several_servers_ends_at_once_and_closes_those_that_are_ready_later(monkeypatch):
    may_be_ready, closed = threading.Event(), threading.Semaphore(0)

    class Ready:
        def close(self) -> None:
            closed.release()

    def start() -> Any:
        assert may_be_ready.wait(LIMIT_S)
        return Ready()

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fleet._start_all([start, start])
    may_be_ready.set()
    assert closed.acquire(timeout=LIMIT_S)
    assert closed.acquire(timeout=LIMIT_S)
