"""Servers that join and leave a router while it works: what they may not do to the others, and who may not leave."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from backends.router.scripted import LIMIT_S, ScriptedEngine
from backends.router.test_router_engine import FAST, all_of, interrupted, is_whole, request, routed, until, update

from headwater.backends.router.engine import RoutedServer, RouterEngine
from headwater.core.errors import BaseMissing, LeftOut, ServerKept, TransferLost, WaitTimeout, WeightsError

pytestmark = pytest.mark.timeout(600)

OF_A_RUN = replace(FAST, keeps_one=True)


def states(router: RouterEngine) -> dict[str, str]:
    return {each.name: each.state for each in router.status().servers}


def publish(router: RouterEngine, version: int, **fields) -> None:
    sent = update(version, float(version), **fields)
    again = lambda: iter(list(update(version, float(version)).buckets))  # noqa: E731
    router.update_weights(replace(sent, again=again)).result(LIMIT_S)


def test_the_last_server_that_can_serve_is_kept():
    engines = [ScriptedEngine() for _ in range(3)]
    with routed(*engines, options=OF_A_RUN) as router:
        publish(router, 1)
        router.drain("s0")
        engines[1].is_dead = True
        until(lambda: not router.status().servers[1].is_alive)
        for change in (router.drain, router.remove):
            with pytest.raises(ServerKept, match=r"s2: is the last server that can serve \(s0: drained"):
                change("s2")
        asyncio.run(all_of(router, [request(key, 2) for key in range(4)]))
        router.remove("s1")  # it could not serve anyway
        router.add(RoutedServer("s3", ScriptedEngine()))
        with pytest.raises(ServerKept):  # the new one has no weights yet, and may not be able to take them
            router.drain("s2")
        publish(router, 1, is_repeat=True)
        router.drain("s2")
        assert states(router) == {"s0": "drained", "s2": "drained", "s3": "serving"}
        router.remove("s0")
        router.remove("s2")
        with pytest.raises(ServerKept, match="last server"):
            router.remove("s3")
        asyncio.run(all_of(router, [request(key, 2) for key in range(4)]))


def test_two_callers_cannot_drain_the_last_two_servers():
    for _ in range(20):
        refused: list[ServerKept] = []
        with routed(ScriptedEngine(), ScriptedEngine(), options=OF_A_RUN) as router:
            ready = threading.Barrier(2)

            def drain(name: str, router: RouterEngine = router, ready: threading.Barrier = ready) -> None:
                ready.wait(LIMIT_S)
                try:
                    router.drain(name)
                except ServerKept as error:
                    refused.append(error)  # noqa: B023

            threads = [threading.Thread(target=drain, args=(name,)) for name in router.names]
            for each in threads:
                each.start()
            for each in threads:
                each.join(LIMIT_S)
            assert len(refused) == 1
            asyncio.run(all_of(router, [request(key, 2) for key in range(4)]))


def test_a_server_that_leaves_cannot_be_undrained_or_removed_again():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=OF_A_RUN) as router:
        removing: list[threading.Thread] = []

        def leave() -> None:
            removing.append(threading.Thread(target=router.remove, args=("s0",), kwargs={"move": False}))
            removing[0].start()
            until(lambda: states(router)["s0"].startswith("being removed, "))
            for change in (router.undrain, router.remove):
                with pytest.raises(ServerKept, match="is being removed"):
                    change("s0")

        asked = [request(key, 40) for key in range(8)]
        responses = asyncio.run(interrupted(router, asked, engines, leave))
        removing[0].join(LIMIT_S)
        assert all(is_whole(each, response) for each, response in zip(asked, responses, strict=True))
        assert states(router) == {"s1": "serving"}
        assert engines[0].num_served == 4, "its requests were not moved"
        assert engines[0].is_closed


def test_a_server_leaves_between_two_updates_and_not_in_one():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=OF_A_RUN) as router:
        engines[1].may_update.clear()
        sent = router.update_weights(update(1, 1.0))
        until(lambda: engines[1].is_updating)
        removing = threading.Thread(target=router.remove, args=("s0",))
        removing.start()
        until(lambda: states(router)["s0"].startswith("being removed"))
        assert not engines[0].is_closed
        engines[1].may_update.set()
        sent.result(LIMIT_S)
        removing.join(LIMIT_S)
        assert engines[0].is_closed
        assert engines[0].version == 1
        assert router.names == ("s1",)


def test_a_server_is_closed_although_no_one_waits_for_its_removal_any_more():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=OF_A_RUN) as router:
        engines[1].may_update.clear()
        sent = router.update_weights(update(1, 1.0))
        until(lambda: engines[1].is_updating)
        with pytest.raises(WaitTimeout):
            router.remove("s0", limit_s=0.2)
        engines[1].may_update.set()
        sent.result(LIMIT_S)
        until(lambda: engines[0].is_closed)
        assert router.names == ("s1",)


def test_a_server_that_joins_gets_the_weights_before_it_generates():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=OF_A_RUN) as router:
        for version in (0, 1):
            publish(router, version)
            new = ScriptedEngine()
            new.needs_weights = True  # as every server that a run has not given weights
            router.add(RoutedServer(f"new {version}", new))
            assert states(router)[f"new {version}"] == "without the newest weights: it is new"
            asyncio.run(all_of(router, [request(key, 2) for key in range(12)]))
            assert new.num_served == 0
            assert router.status().needs_weights
            publish(router, version, is_repeat=True)
            assert not router.status().needs_weights
            first = 100 * (version + 1)  # sessions that another server has begun stay there
            asyncio.run(all_of(router, [request(key, 2) for key in range(first, first + 12)]))
            assert new.num_served > 0
            assert router.weights_checksum() == new.weights


@pytest.mark.parametrize("order", ["together", "rolling"])
def test_a_server_that_cannot_take_the_weights_is_left_out_and_the_others_go_on(order, caplog):
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=replace(OF_A_RUN, update_order=order)) as router:
        publish(router, 1)
        other = ScriptedEngine()
        other.fails_update = WeightsError("weight update refused: another model")
        router.add(RoutedServer("other", other))
        publish(router, 2)  # it takes part in the next update, and spoils it for no one
        assert [engine.version for engine in engines] == [2, 2]
        assert "another model" in states(router)["other"]
        for _ in range(2):  # sent to it alone, because no other server needs the weights
            assert router.status().needs_weights
            with pytest.raises(LeftOut, match="other: did not take the weights of version 2"):
                publish(router, 2, is_repeat=True)
        assert not router.status().needs_weights, "it was asked often enough"
        assert "left out after 3 attempts, undrain it" in states(router)["other"]
        publish(router, 3)
        assert [engine.version for engine in engines] == [3, 3]
        assert router.weights_checksum() == engines[0].weights
        asyncio.run(all_of(router, [request(key, 2) for key in range(8)]))
        assert other.num_served == 0
        router.remove("other")
        assert not any(each.state != "serving" for each in router.status().servers)


@pytest.mark.parametrize("order", ["together", "rolling"])
def test_a_server_that_joins_is_sent_all_weights_before_adapters_alone(order):
    """Its process may still have the weights of another run, which would take the adapters."""
    old, new = ScriptedEngine(), ScriptedEngine()
    with routed(old, options=replace(OF_A_RUN, update_order=order)) as router:
        publish(router, 1)
        router.add(RoutedServer("new", new))
        publish(router, 2, adapters_alone=True)
        assert (old.version, new.version) == (2, 0)
        assert router.status().needs_weights
        assert "it is new" in states(router)["new"]
        publish(router, 2, is_repeat=True)
        publish(router, 3, adapters_alone=True)
        assert (old.version, new.version) == (3, 3)
        newest = ScriptedEngine()
        router.add(RoutedServer("newest", newest))
        old.is_dead = new.is_dead = True
        until(lambda: not any(each.is_alive for each in router.status().servers[:2]))
        with pytest.raises(BaseMissing):
            publish(router, 4, adapters_alone=True)
        publish(router, 4)
        assert newest.version == 4


def test_a_server_that_is_lost_with_every_transfer_does_not_end_the_run():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=OF_A_RUN) as router:
        publish(router, 1)
        flaky = ScriptedEngine()
        flaky.fails_update = TransferLost("connection reset")
        router.add(RoutedServer("flaky", flaky))
        with pytest.raises(LeftOut):
            publish(router, 1, is_repeat=True)
        flaky.fails_update = None
        publish(router, 1, is_repeat=True)
        assert states(router)["flaky"] == "serving"


def test_a_new_server_that_hangs_in_its_first_update_is_soon_left_out():
    options = replace(OF_A_RUN, update_start_limit_s=10 * LIMIT_S, update_new_start_limit_s=0.2)
    old, new = ScriptedEngine(), ScriptedEngine()
    with routed(old, options=options) as router:
        publish(router, 1)
        new.may_begin.clear()
        router.add(RoutedServer("new", new))
        with pytest.raises(LeftOut, match="did not take bucket 0 within"):
            publish(router, 1, is_repeat=True)
        publish(router, 2)
        assert old.version == 2
        new.may_begin.set()


@pytest.mark.parametrize("fails", [WeightsError("another model"), TransferLost("connection reset")])
def test_a_new_server_that_cannot_take_the_weights_ends_no_run_while_the_others_are_lost(fails):
    old, bad = ScriptedEngine(), ScriptedEngine()
    with routed(old, options=OF_A_RUN) as router:
        publish(router, 1)
        bad.fails_update = fails
        router.add(RoutedServer("bad", bad))
        old.is_dead = True
        until(lambda: not router.status().servers[0].is_alive)
        with pytest.raises(LeftOut):
            publish(router, 1, is_repeat=True)
        for _ in range(2):
            with pytest.raises(TransferLost):  # it is sent again
                publish(router, 2)
        assert "left out after 3 attempts" in states(router)["bad"]
        threading.Timer(0.2, lambda: setattr(old, "is_dead", False)).start()
        publish(router, 2)
        assert old.version == 2


def test_a_server_that_has_worked_may_be_lost_often():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=OF_A_RUN) as router:
        publish(router, 1)
        engines[1].fails_update = TransferLost("connection reset")
        publish(router, 2)
        for _ in range(4):
            with pytest.raises(LeftOut):
                publish(router, 2, is_repeat=True)
        engines[1].fails_update = None
        publish(router, 2, is_repeat=True)
        assert states(router) == {"s0": "serving", "s1": "serving"}


def test_weights_that_no_server_has_are_still_an_error():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=OF_A_RUN) as router:
        publish(router, 1)
        for engine in engines:
            engine.fails_update = TransferLost("connection reset")
        with pytest.raises(TransferLost) as ended:
            publish(router, 2)
        assert not isinstance(ended.value, LeftOut)


def test_a_server_that_joins_a_paused_router_is_paused():
    with routed(ScriptedEngine(), options=OF_A_RUN) as router:
        router.pause()
        new = ScriptedEngine()
        router.add(RoutedServer("new", new))
        assert new.is_paused
        router.resume()
        assert not new.is_paused


def test_a_server_that_fails_while_it_joins_is_not_kept():
    with routed(ScriptedEngine(), options=OF_A_RUN) as router:
        router.pause()
        new = ScriptedEngine()
        new.pause = lambda: new.missing  # type: ignore[method-assign]
        with pytest.raises(AttributeError):
            router.add(RoutedServer("new", new))
        assert router.names == ("s0",)
        router.add(RoutedServer("new", ScriptedEngine()))


@pytest.mark.parametrize("measures", [True, False], ids=["at once", "later"])
def test_counters_neither_jump_nor_fall_when_servers_join_and_leave(measures):
    def served() -> float:
        return router.status().metrics["num_finished"]

    with routed(ScriptedEngine(), options=OF_A_RUN) as router:
        asyncio.run(all_of(router, [request(key, 2) for key in range(5)]))
        until(lambda: served() == 5)
        new = ScriptedEngine()
        new.num_served = 1000  # for others, before it joined
        new.measures = measures  # servers of vLLM and SGLang do not before the first health check
        router.add(RoutedServer("new", new))
        new.measures = True
        until(lambda: "num_finished" in router._roster.member("new").metrics)
        assert served() == 5
        asyncio.run(all_of(router, [request(key, 2) for key in range(10, 20)]))
        until(lambda: served() == 15)
        router.remove("s0")
        assert served() == 15
        new.num_served = 0  # an older report of the same process
        asyncio.run(all_of(router, [request(key, 2) for key in range(20, 24)]))
        assert served() == 15
