"""Control calls, the text format of metrics, names of running requests, and the settings of the command."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from serving.parts import assert_refused, refusal

from headwater.cli.serve import is_loopback, read_engine_config
from headwater.config.schema import EngineConfig
from headwater.core.capabilities import ServerStatus
from headwater.core.errors import ConfigError
from headwater.serving.control import Abort, WeightsCall, read_memory_tags, read_nothing, read_version
from headwater.serving.control_routes import metrics_text, server_metrics_text
from headwater.serving.state import ActiveRequests
from headwater.serving.weight_stream import SlotCall, StartCall, read_finish
from headwater.weights.shared_memory import SlotEntry


def test_bodies():
    assert read_version({"version": 3}) == 3
    assert read_memory_tags({"tags": ["kv_cache"]}) == ("kv_cache",)
    assert read_memory_tags({}) == ("kv_cache", "weights")
    assert Abort.read({"request_id": "a"}) == Abort("a")
    assert Abort.read({"all": True}) == Abort(None)
    call = WeightsCall.read({"version": 3, "mode": "drain", "source": {"file": "x"}})
    assert call == WeightsCall(3, "drain", "x")
    assert WeightsCall.read({"version": 3, "source": {"file": "x"}}).mode is None
    checked = WeightsCall.read({"version": 3, "source": {"file": "x", "is_checked": True}})
    assert (call.is_checked, checked.is_checked) == (False, True)
    assert WeightsCall.read({"version": 3, "source": {"file": "x"}, "limit_s": 4000.5}).limit_s == 4000.5
    start = {"version": 3, "shapes": {"w": [2, 3]}, "dtype": "float32", "shared_memory": "x", "slot_bytes": 64}
    assert StartCall.read(start) == StartCall(3, None, {"w": (2, 3)}, torch.float32, "x", 64)
    entry = {"name": "w", "shape": [2, 3], "offset": 8}
    assert SlotCall.read({"slot": 1, "tensors": [entry]}) == SlotCall(1, (SlotEntry("w", (2, 3), 8),))
    assert (read_finish({}), read_finish({"error": "why"})) == (None, "why")


REFUSED = [
    (read_nothing, {"now": True}, "now: no such field"),
    (read_version, {}, "version: is missing"),
    (read_version, {"version": -1}, "version = -1: must be >= 0"),
    (read_memory_tags, {"tags": ["optimizer"]}, 'tags[0] = "optimizer": must be one of kv_cache, weights'),
    (Abort.read, {}, "name one request, or set all = true"),
    (Abort.read, {"request_id": "a", "all": True}, "name one request, or set all = true"),
    (WeightsCall.read, {"version": 1}, "source: is missing"),
    (WeightsCall.read, {"version": 1, "source": {}}, "source: is missing"),
    (StartCall.read, {"version": 1, "shapes": {"w": [1]}, "dtype": "float32"}, "give all of them"),
    (StartCall.read, {"shapes": {"w": 1}, "dtype": "int8"}, "dtype"),
    (SlotCall.read, {"slot": 0}, "a slot is"),
    (SlotCall.read, {"slot": 0, "tensors": [7]}, "tensors[0] = 7: must be an object"),
    (SlotCall.read, {"slot": 0, "tensors": [{"name": "w", "place": 1}]}, "tensors[0].place: no such field"),
    (WeightsCall.read, {"version": 1, "source": {"path": "x"}}, "source.path: no such field"),
    (WeightsCall.read, {"version": 1, "mode": "now", "source": {"file": "x"}}, "interrupt, in_flight, drain"),
]


def test_refusals():
    for read, body, part in REFUSED:
        assert_refused(read, [(body, part)])


def test_metrics_in_prometheus_format():
    values = {"num_running": 2, "num_finished": 7, "tokens_per_s": 1.5, "is_paused": True, "note": "x", "later": None}
    assert metrics_text(values, {"model": 'a"\\b'}).splitlines() == [
        "# TYPE headwater_info gauge",
        'headwater_info{model="a\\"\\\\b"} 1',
        "# TYPE headwater_num_running gauge",
        "headwater_num_running 2",
        "# TYPE headwater_num_finished counter",
        "headwater_num_finished 7",
        "# TYPE headwater_tokens_per_s gauge",
        "headwater_tokens_per_s 1.5",
        "# TYPE headwater_is_paused gauge",
        "headwater_is_paused 1",
    ]


def test_a_name_is_taken_while_its_request_runs():
    active = ActiveRequests()
    with active.hold({"batch": ("a", "b"), "a": ("a",)}, "rid"):
        assert active.find("batch") == ("a", "b")
        assert 'rid = "a": a request with this name is running' in str(
            refusal(active.hold({"a": ("a",)}, "rid").__enter__)
        )
        assert active.find("a") == ("a",)
    assert active.find("batch") == active.find("a") == ()


def test_a_name_may_be_shared_and_is_free_when_the_last_has_ended():
    active = ActiveRequests()
    with active.hold({"a": ("a", "b")}, "rid"):
        with active.share({"a": ("a",)}), active.share({"a": ("a",)}):
            assert active.find("a") == ("a", "b")
        assert active.find("a") == ("a", "b")
    with active.share({"a": ("a",)}):
        assert "a request with this name is running" in str(refusal(active.hold({"a": ("a",)}, "rid").__enter__))
    with active.hold({"a": ("a",)}, "rid"):
        assert active.find("a") == ("a",)
    assert active.find("a") == ()


def test_settings_of_the_engine():
    config = read_engine_config(["engine.max_queue=7", "engine.update_mode=drain"])
    assert (config.max_queue, config.update_mode) == (7, "drain")
    assert {**asdict(config), "max_queue": 65536, "update_mode": "auto"} == asdict(EngineConfig())


def test_wrong_settings_are_told_all_at_once():
    with pytest.raises(ConfigError) as caught:
        read_engine_config(["engine.max_queu=7", "engine.decode_steps=0", "trainer.total_steps=5", "max_queue"])
    problems = "\n".join(caught.value.problems)
    assert "did you mean engine.max_queue?" in problems
    assert "engine.decode_steps = 0 (command line): must be >= 1" in problems
    assert "trainer.total_steps (command line): no such key" in problems
    assert "an override needs a value" in problems
    with pytest.raises(
        ConfigError, match=r"engine\.memory_fraction = 0\.5: nothing reads this, because engine\.kv_cache_gib"
    ):
        read_engine_config(["engine.kv_cache_gib=1", "engine.memory_fraction=0.5"])


def test_loopback_addresses():
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("fe80::1%eth0")


def test_the_servers_of_a_router_are_metrics_with_a_label():
    servers = (ServerStatus("a", version=3, num_running=2), ServerStatus('b"', is_alive=False))
    lines = server_metrics_text(servers).splitlines()
    assert 'headwater_server_version{server="a"} 3' in lines
    assert 'headwater_server_is_alive{server="b\\""} 0' in lines
    assert server_metrics_text(()) == ""
