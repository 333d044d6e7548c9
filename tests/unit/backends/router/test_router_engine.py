"""The router over engines that die, hang, refuse weights, come and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from backends.router.scripted import LIMIT_S, ScriptedEngine, expected
from patience import long_enough

from headwater.backends.router import roster
from headwater.backends.router.engine import RoutedServer, RouterEngine, RouterOptions
from headwater.backends.router.member import Member, common_metrics
from headwater.backends.router.updates import send_to_all
from headwater.core.errors import (
    ConfigError,
    MemoryRefused,
    QueueFull,
    RolloutFailed,
    ServerLost,
    TransferLost,
    WeightsError,
    WeightsIncomplete,
)
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import Delta, Grammar, ModelRequest, ModelResponse, SamplingParams
from headwater.core.waits import OpenWait, open_waits

pytestmark = pytest.mark.timeout(600)

FAST = RouterOptions(health_every_s=0.02, update_bucket_limit_s=LIMIT_S, update_start_limit_s=LIMIT_S)


@contextmanager
def routed(*engines: ScriptedEngine, options: RouterOptions = FAST) -> Iterator[RouterEngine]:
    router = RouterEngine([RoutedServer(f"s{place}", engine) for place, engine in enumerate(engines)], options)
    try:
        yield router
    finally:
        router.close()


def request(key: int, num_tokens: int = 20, session: str = "", **fields) -> ModelRequest:
    sampling = SamplingParams(max_new_tokens=num_tokens)
    return ModelRequest(f"r{key}", (1,), sampling, key, session=session or f"session {key}", **fields)


def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


async def all_of(router: RouterEngine, requests: list[ModelRequest]):
    return await asyncio.wait_for(asyncio.gather(*map(router.agenerate, requests)), LIMIT_S)


async def interrupted(
    router: RouterEngine, requests: list[ModelRequest], engines: list[ScriptedEngine], then: Callable[[], object]
):
    """The responses, of which all have begun and none has ended when ``then`` is called."""
    for engine in engines:
        engine.holds_at = 5
    tasks = [asyncio.create_task(router.agenerate(each)) for each in requests]
    async with asyncio.timeout(LIMIT_S):
        while sum(engine.num_held for engine in engines) < len(requests):  # noqa: ASYNC110  belongs to no event loop
            await asyncio.sleep(0.001)
    await asyncio.to_thread(then)
    for engine in engines:
        engine.holds_at = None
    return await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)


def is_whole(asked: ModelRequest, response) -> bool:
    return response.output_tokens == expected(asked) and response.stop_reason == "length"


def update(version: int, value: float, **fields) -> WeightUpdate:
    buckets = ([(f"w{place}", torch.full((2,), value + place))] for place in range(3))
    return WeightUpdate(version, {f"w{place}": (2,) for place in range(3)}, buckets, **fields)


def test_requests_are_spread_and_bounded_and_sessions_stay():
    engines = [ScriptedEngine(max_queue=8), ScriptedEngine(max_queue=8)]
    with routed(*engines) as router:
        asked = [request(key, 5) for key in range(60)]
        for _ in range(2):
            responses = asyncio.run(all_of(router, asked))
            assert all(is_whole(each, response) for each, response in zip(asked, responses, strict=True))
        assert [engine.most_open for engine in engines] == [8, 8]
        status = router.status()
        assert status.metrics["router_num_placed"] == 120
        until(lambda: router.status().metrics["num_finished"] == 120)
        assert "num_running" not in status.metrics
        assert status.metrics["router_num_sessions"] == 60
        assert [(each.name, each.state) for each in status.servers] == [("s0", "serving"), ("s1", "serving")]
        # One after the other, so that no server is full: every session finds its cache again.
        homes = {name: place for place, engine in enumerate(engines) for name in engine.sessions}
        for each in asked[:10]:
            asyncio.run(router.agenerate(each))
            assert engines[homes[each.session]].sessions[-1] == each.session


def test_the_status_tells_what_servers_measure_before_the_first_health_check():
    engines = [ScriptedEngine(), ScriptedEngine()]
    for engine in engines:
        engine.num_served = 3
    with routed(*engines, options=RouterOptions(health_every_s=10 * LIMIT_S)) as router:
        assert router.status().metrics["num_finished"] == 6


def test_a_server_that_dies_loses_no_token():
    for resumable in (True, False):
        engines = [ScriptedEngine(resumable=resumable) for _ in range(3)]
        with routed(*engines) as router:
            asked = [request(key, 40) for key in range(30)]

            def kill(engines: list[ScriptedEngine] = engines) -> None:
                engines[0].is_dead = True

            responses = asyncio.run(interrupted(router, asked, engines, kill))
            assert all(is_whole(each, response) for each, response in zip(asked, responses, strict=True)), resumable
            until(lambda router=router: router.status().servers[0].state.startswith("unreachable: connection refused"))
            assert router.status().metrics["router_num_requests_moved"] == 10
            engines[0].is_dead = False
            until(lambda router=router: router.status().servers[0].state == "serving")


def test_a_server_that_hangs_gives_back_what_it_has():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines) as router:
        asked = [request(key, 40) for key in range(10)]

        def hang() -> None:
            engines[1].is_hanging = True

        responses = asyncio.run(interrupted(router, asked, engines, hang))
        assert all(is_whole(each, response) for each, response in zip(asked, responses, strict=True))


class Streaming(ScriptedEngine):
    """Yields its tokens one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, streaming=True)

    async def astream(self, request: ModelRequest):
        self.num_open += 1
        try:
            for token in expected(request)[len(request.given_tokens) :]:
                await asyncio.sleep(0.001)
                if self.is_hanging:
                    await asyncio.Event().wait()
                if self.is_dead:
                    # As an engine that does not say which of its tokens the stream has delivered.
                    raise ServerLost("reset", ModelResponse(request.input_tokens, (1,), (0.0,), (0,), "abort"))
                yield Delta((token,), (0.0,), (self.version,))
            yield Delta((), (), (), "length")
        finally:
            self.num_open -= 1


class Silent(Streaming):
    """Never returns what it has."""

    def abort(self, request_id: str | None = None) -> int:
        threading.Event().wait(60)
        return 0

    def close(self) -> None:
        self.is_closed = True


def test_a_stream_that_a_server_does_not_give_back_continues_on_another_one(monkeypatch):
    monkeypatch.setattr(roster, "_EVACUATE_S", 0.05)
    engines = [Silent(), Silent()]
    with routed(*engines) as router:

        async def follow(asked: ModelRequest) -> tuple[int, ...]:
            tokens: list[int] = []
            async for delta in router.astream(asked):
                tokens += delta.tokens
                if asked.rng_key == 0 and len(tokens) == 10:
                    engines[0].is_hanging = True
            assert delta.stop_reason == "length"
            return tuple(tokens)

        async def scene() -> None:
            asked = [request(key, 40) for key in range(4)]
            given = await asyncio.wait_for(asyncio.gather(*map(follow, asked)), LIMIT_S)
            assert given == [expected(each) for each in asked]

        asyncio.run(scene())
        assert router.status().metrics["router_num_requests_moved"] == 2
        assert engines[0].num_open == 0, "the hanging streams were ended"


def test_a_request_that_full_queues_refuse_for_too_long_fails():
    class Full(ScriptedEngine):
        num_refusals = 10**9

        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            if self.num_refusals:
                self.num_refusals -= 1
                raise QueueFull("no room")
            return await super().agenerate(request)

    engine = Full()
    with routed(engine, options=replace(FAST, no_server_limit_s=0.5)) as router:
        with pytest.raises(QueueFull, match=r"full for 0\.5 s, the last one that of s0; add servers"):
            asyncio.run(asyncio.wait_for(router.agenerate(request(0)), LIMIT_S))
        assert router.status().servers[0].state == "serving"
    engine = Full()
    engine.num_refusals = 2
    with routed(engine) as router:
        [response] = asyncio.run(all_of(router, [request(1)]))
        assert is_whole(request(1), response)


def test_what_a_server_does_not_give_back_is_generated_again(monkeypatch):
    monkeypatch.setattr(roster, "_EVACUATE_S", 0.05)
    engines = [Silent(), ScriptedEngine()]
    with routed(*engines) as router:
        asked = [request(key, 40) for key in range(6)]

        def hang() -> None:
            engines[0].is_hanging = True

        responses = asyncio.run(interrupted(router, asked, engines, hang))
        assert all(is_whole(each, response) for each, response in zip(asked, responses, strict=True))


def test_an_engine_that_has_failed_for_good_is_left_out_and_without_any_requests_fail():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines) as router:

        def fail_first() -> None:
            engines[0].has_failed = True

        asked = [request(key, 30) for key in range(6)]
        responses = asyncio.run(interrupted(router, asked, engines, fail_first))
        assert all(is_whole(each, response) for each, response in zip(asked, responses, strict=True))
        engines[1].has_failed = True
        with pytest.raises(RolloutFailed, match=r"no server can take it.*s0: failed"):
            asyncio.run(router.agenerate(request(99, 200)))
        assert not router.status().is_alive


def test_a_server_whose_engine_gave_up_is_connected_to_anew(monkeypatch):
    monkeypatch.setattr(roster, "_CONNECT_EVERY_S", 0.05)
    first, second, others = ScriptedEngine(), ScriptedEngine(version=1), ScriptedEngine()
    attempts = iter([ServerLost("still down"), ValueError("a proxy answers"), second])

    def connect() -> ScriptedEngine:
        attempt = next(attempts)
        if isinstance(attempt, Exception):
            raise attempt
        return attempt

    router = RouterEngine([RoutedServer("s0", first, connect=connect), RoutedServer("s1", others)], FAST)
    try:
        router.update_weights(update(1, 1.0)).result(LIMIT_S)
        first.has_failed = True
        until(lambda: router.status().servers[0].state == "serving" and first.is_closed)
        asyncio.run(all_of(router, [request(key, 2) for key in range(8)]))
        assert second.num_served == 4
    finally:
        router.close()


def test_a_request_that_kills_every_server_fails_in_the_end():
    class Deadly(ScriptedEngine):
        async def agenerate(self, request):
            raise ServerLost("reset by peer")

    with (
        routed(*(Deadly() for _ in range(3))) as router,
        pytest.raises(RolloutFailed, match="this request may be the cause"),
    ):
        asyncio.run(asyncio.wait_for(router.agenerate(request(0)), LIMIT_S))


def test_drain_move_add_and_remove_under_load():
    engines = [ScriptedEngine(tick_s=0.005), ScriptedEngine(tick_s=0.005)]
    with routed(*engines) as router:
        third = ScriptedEngine()

        def change() -> None:
            router.drain("s0")
            assert router.status().servers[0].state.startswith("draining, ")
            router.add(RoutedServer("s2", third))
            router.remove("s1")

        asked = [request(key, 40) for key in range(20)]
        responses = asyncio.run(interrupted(router, asked, engines, change))
        assert all(is_whole(each, response) for each, response in zip(asked, responses, strict=True))
        assert engines[1].is_closed
        assert third.num_served >= 10
        assert [(each.name, each.state) for each in router.status().servers] == [("s0", "drained"), ("s2", "serving")]
        router.undrain("s0")
        assert router.status().servers[0].state == "serving"
        with pytest.raises(KeyError, match="'s1' is not in the router; its servers are s0, s2"):
            router.drain("s1")
        other = ScriptedEngine()
        other.limits = replace(other.limits, vocab_size=5)
        with pytest.raises(ConfigError, match="serve one model"):
            router.add(RoutedServer("s3", other))


def test_abort_returns_what_there_is_running_or_waiting():
    engines = [ScriptedEngine(max_queue=1)]
    with routed(*engines) as router:

        async def scene() -> None:
            engines[0].holds_at = 5
            tasks = [asyncio.create_task(router.agenerate(request(key, 2000))) for key in range(3)]
            async with asyncio.timeout(LIMIT_S):
                while not engines[0].num_held:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert router.abort("r0") == 1
            first = await asyncio.wait_for(tasks[0], LIMIT_S)
            assert first.stop_reason == "abort"
            assert first.output_len == 5
            assert first.output_tokens == expected(request(0, 2000))[: first.output_len]
            assert router.abort() == 2
            others = await asyncio.wait_for(asyncio.gather(*tasks[1:]), LIMIT_S)
            assert [each.stop_reason for each in others] == ["abort", "abort"]

        asyncio.run(scene())


def test_a_cancelled_caller_frees_its_place_and_a_full_queue_refuses():
    engine = ScriptedEngine(max_queue=1)
    with routed(engine, options=replace(FAST, max_waiting=1)) as router:

        async def scene() -> None:
            engine.holds_at = 0
            running = asyncio.create_task(router.agenerate(request(0, 2000)))
            waiting = asyncio.create_task(router.agenerate(request(1, 5)))
            async with asyncio.timeout(LIMIT_S):
                while not engine.num_held or not router.status().num_waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            with pytest.raises(QueueFull, match="1 requests wait"):
                await router.agenerate(request(2))
            running.cancel()
            engine.holds_at = None
            assert is_whole(request(1, 5), await asyncio.wait_for(waiting, LIMIT_S))

        asyncio.run(scene())
        assert router.status().num_waiting == 0


def test_control_reaches_all_and_a_server_that_comes_back_is_told():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines) as router:
        engines[1].is_dead = True
        router.pause()
        router.sleep(["kv_cache"])
        assert engines[0].is_paused
        assert router.status().is_paused
        assert router.status().is_asleep
        engines[1].is_dead = False
        until(lambda: router.status().servers[1].state == "serving")
        assert engines[1].is_paused
        assert engines[1].asleep == {"kv_cache"}
        router.wake()
        router.resume()
        assert not any(engine.is_paused or engine.asleep for engine in engines)


def test_control_calls_while_all_servers_are_lost_are_told_to_those_that_come_back():
    engines = [ScriptedEngine(), ScriptedEngine()]

    def lose_all() -> None:
        for engine in engines:
            engine.is_dead = True

    def all_return() -> None:
        for engine in engines:
            engine.is_dead = False
        until(lambda: all(each.state == "serving" for each in router.status().servers))

    with routed(*engines) as router:
        for is_noticed in (False, True):  # they are lost in the call, or before it
            lose_all()
            if is_noticed:
                until(lambda: not any(each.is_alive for each in router.status().servers))
            router.pause()
            router.sleep()
            router.set_version(0)
            all_return()
            assert all(engine.is_paused and engine.asleep == {"kv_cache", "weights"} for engine in engines)
            lose_all()
            if is_noticed:
                until(lambda: not any(each.is_alive for each in router.status().servers))
            router.wake(["weights"])
            router.resume()
            all_return()
            assert all(not engine.is_paused and engine.asleep == {"kv_cache"} for engine in engines)
            router.wake()
            assert not router.status().is_asleep
        asyncio.run(all_of(router, [request(key, 2) for key in range(4)]))


def test_closing_ends_an_update_that_waits_for_a_server():
    engine = ScriptedEngine()
    with routed(engine) as router:
        engine.is_dead = True
        until(lambda: not any(each.is_alive for each in router.status().servers))
        sent = router.update_weights(update(1, 1.0))
        until(lambda: any(each.kind == "weights" for each in open_waits()))
    with pytest.raises(RolloutFailed, match="the engine is closed"):
        sent.result(0)


def test_a_control_call_that_all_servers_refuse_is_an_error(monkeypatch):
    """It could be repeated for ever: the servers are not lost."""
    engines = [ScriptedEngine(), ScriptedEngine()]

    def refuse(tags) -> None:
        raise RolloutFailed("it cannot release its memory")

    for engine in engines:
        monkeypatch.setattr(engine, "sleep", refuse)
    with routed(*engines) as router, pytest.raises(RolloutFailed, match="cannot release its memory"):
        router.sleep()


def test_a_server_without_memory_for_all_of_it_stays_asleep_and_is_woken_later(monkeypatch):
    engine = ScriptedEngine()

    def refuse(tags) -> None:
        raise MemoryRefused("too little memory")

    with routed(engine) as router:
        router.sleep()
        with monkeypatch.context() as patched:
            patched.setattr(engine, "wake", refuse)
            with pytest.raises(MemoryRefused):
                router.wake()
        assert router.status().is_asleep
        router.wake()
        assert not router.status().is_asleep
        assert not engine.asleep


def test_weights_reach_all_and_one_that_was_lost_gets_them_again():
    engines = [ScriptedEngine() for _ in range(3)]
    engines[1].pause_s = 0.5  # first: a report from before it may be taken only after the update
    with routed(*engines) as router:
        router.update_weights(update(1, 1.0)).result(LIMIT_S)
        assert [engine.version for engine in engines] == [1, 1, 1]
        assert router.status().metrics["last_update_pause_s"] == 0.5
        assert router.weights_checksum() == "w0=2,w1=4,w2=6"
        engines[2].is_dead = True
        until(lambda: not router.status().servers[2].is_alive)
        router.update_weights(update(2, 5.0)).result(LIMIT_S)
        assert (router.get_version(), router.status().needs_weights) == (2, False)
        engines[2].is_dead = False
        until(lambda: router.status().needs_weights)
        assert "without the newest weights" in router.status().servers[2].state
        asyncio.run(all_of(router, [request(key, 2) for key in range(12)]))
        assert engines[2].num_served == 0, "it must not serve old weights"
        engines[0].fails_update = AssertionError("it has them already")
        router.update_weights(update(2, 5.0, is_repeat=True)).result(LIMIT_S)
        assert not router.status().needs_weights
        assert router.weights_checksum() == "w0=10,w1=12,w2=14"
        engines[1].weights = "damaged"
        with pytest.raises(WeightsError, match="s1 serves other weights"):
            router.weights_checksum()


def test_weights_are_sent_again_if_all_servers_that_took_them_are_lost(monkeypatch):
    engines = [ScriptedEngine() for _ in range(2)]
    with routed(*engines) as router:
        router.update_weights(update(1, 1.0)).result(LIMIT_S)

        def lost() -> str:
            raise ServerLost("the node has ended")

        for engine in engines:
            monkeypatch.setattr(engine, "weights_checksum", lost)
        with pytest.raises(TransferLost, match="no server has the newest weights any more"):
            router.weights_checksum()


def test_a_server_that_dies_during_an_update_does_not_hold_up_the_others():
    engines = [ScriptedEngine() for _ in range(2)]
    with routed(*engines) as router:
        engines[1].fails_update = WeightsIncomplete("half")
        router.update_weights(update(1, 1.0)).result(LIMIT_S)
        assert [each.version for each in router.status().servers] == [1, 0]
        assert router.status().needs_weights
        engines[1].fails_update = None
        router.update_weights(update(1, 1.0, is_repeat=True)).result(LIMIT_S)
        assert not router.status().needs_weights
        assert router.weights_checksum()


def test_an_update_is_over_when_the_end_of_every_server_was_noted():
    """The thread of a server that notes its end late must not undo what the next update has noted."""
    noted: list[str] = []

    def note_late(member: Member, error: BaseException | None) -> None:
        time.sleep(0.2)
        noted.append(member.name)

    members = {name: Member(RoutedServer(name, ScriptedEngine())) for name in ("s0", "s1")}
    send_to_all(update(1, 1.0), None, members, note_late, FAST)
    assert sorted(noted) == ["s0", "s1"]


def test_weights_that_all_refuse_leave_everything_as_it_was():
    engines = [ScriptedEngine() for _ in range(2)]
    with routed(*engines) as router:
        for engine in engines:
            engine.fails_update = WeightsError("weight update refused")
        with pytest.raises(WeightsError, match="refused"):
            router.update_weights(update(1, 1.0)).result(LIMIT_S)
        assert all(each.state == "serving" for each in router.status().servers)
        # One that alone refuses has another model, and is not asked for ever.
        engines[0].fails_update = None
        router.update_weights(update(1, 1.0)).result(LIMIT_S)
        for _ in range(2):
            assert router.status().needs_weights
            with pytest.raises(WeightsError):
                router.update_weights(update(1, 1.0, is_repeat=True)).result(LIMIT_S)
        asyncio.run(router.agenerate(request(0)))


def test_no_session_sees_a_version_go_back():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines) as router:

        async def scene() -> None:
            seen = 0
            for turn in range(8):
                if turn % 2:
                    engines[turn // 2 % 2].version = turn  # a rolling update by someone else
                    await asyncio.sleep(0.1)
                response = await asyncio.wait_for(router.agenerate(request(turn, 3, session="one")), LIMIT_S)
                assert min(response.output_versions) >= seen
                seen = max(response.output_versions)

        asyncio.run(scene())


ROLLING = replace(FAST, update_order="rolling")


def again(version: int, value: float, **fields) -> WeightUpdate:
    """An update whose stream can be read several times, as a learner exports it."""
    return replace(update(version, value, **fields), again=lambda: update(version, value).buckets)


def test_a_rolling_update_closes_one_server_at_a_time_and_the_others_generate():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=ROLLING) as router:
        for each in engines:
            each.may_update.clear()
        done = router.update_weights(again(1, 5.0))
        asked: list[ModelRequest] = []
        for _ in range(2):
            until(lambda: any(each.is_updating for each in engines))
            [updated] = [each for each in engines if each.is_updating]
            [other] = [each for each in engines if not each.is_updating]
            num_before, more = updated.num_served, [request(len(asked) + place, 5) for place in range(4)]
            asked += more
            responses = asyncio.run(all_of(router, more))
            assert all(is_whole(each, response) for each, response in zip(more, responses, strict=True))
            assert {version for each in responses for version in each.output_versions} == {other.version}
            assert updated.num_served == num_before, "a server that takes weights gets no requests"
            states = [each.state for each in router.status().servers]
            assert sorted(states) == ["serving", "taking the weights of version 1"]
            assert [each.version for each in router.status().servers] == [each.version for each in engines]
            assert not done.done()
            updated.may_update.set()
            until(lambda each=updated: not each.is_updating)
        done.result(LIMIT_S)
        assert [each.weights for each in engines] == ["w0=10,w1=12,w2=14"] * 2
        assert router.get_version() == 1
        with pytest.raises(WeightsError, match="only once"):
            router.update_weights(update(2, 5.0)).result(LIMIT_S)


def test_a_server_whose_turn_is_broken_off_is_open_again_at_once(monkeypatch):
    with routed(ScriptedEngine(), ScriptedEngine(), options=ROLLING) as router:
        told: list[tuple[int, str, str]] = []
        sync = router._roster.sync

        def noted(member) -> None:
            told.append((threading.get_ident(), member.name, member.updating))
            sync(member)

        monkeypatch.setattr(router._roster, "sync", noted)
        with pytest.raises(WeightsError, match="only once"):
            router.update_weights(update(1, 5.0)).result(LIMIT_S)
        sender, broken_off, _ = [each for each in told if each[2]][-1]
        own = [updating for thread, name, updating in told if (thread, name) == (sender, broken_off)]
        assert own[-1] == "", "not only when the watcher looks next"


def test_a_server_that_dies_in_a_rolling_update_gets_the_weights_later():
    engines = [ScriptedEngine(), ScriptedEngine(), ScriptedEngine()]
    with routed(*engines, options=ROLLING) as router:
        engines[0].fails_update = TransferLost("connection reset")
        router.update_weights(again(1, 5.0)).result(LIMIT_S)
        assert [each.version for each in engines] == [0, 1, 1]
        assert router.status().needs_weights
        engines[0].fails_update = None
        router.update_weights(again(1, 5.0, is_repeat=True)).result(LIMIT_S)
        assert not router.status().needs_weights
        assert {each.state for each in router.status().servers} == {"serving"}


def test_a_request_that_only_older_servers_could_take_waits_by_name_and_fails_after_a_limit():
    def check(limit_s: float) -> None:
        engines = [ScriptedEngine(version=1), ScriptedEngine()]
        with routed(*engines, options=replace(FAST, no_server_limit_s=limit_s)) as router:
            router.drain("s1")
            asyncio.run(router.agenerate(request(0, 3, session="one")))
            router.undrain("s1")
            router.drain("s0")

            async def first_wait(turn: asyncio.Task[ModelResponse]) -> OpenWait:
                while not (named := [each for each in open_waits() if each.kind == "newer_weights"]):
                    assert not turn.done(), "it must wait"
                    await asyncio.sleep(0.01)
                return named[0]

            async def scene() -> None:
                turns = [asyncio.create_task(router.agenerate(request(key, 3, session="one"))) for key in (1, 2)]
                named = await first_wait(turns[0])
                assert "2 requests wait for a server with version 1 or newer" in named.description
                for failed in await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), LIMIT_S):
                    assert isinstance(failed, RolloutFailed)
                    assert "has tokens of version 1" in str(failed)
                assert (await router.agenerate(request(3, 3, session="two"))).output_versions == (0, 0, 0)
                turn = asyncio.create_task(router.agenerate(request(4, 3, session="one")))
                await first_wait(turn)
                engines[1].version = 1
                assert (await asyncio.wait_for(turn, LIMIT_S)).output_versions == (1, 1, 1)

            asyncio.run(asyncio.wait_for(scene(), LIMIT_S))

    long_enough(check, 1.0, 20.0)


def test_a_stream_continues_on_another_server_without_a_gap():
    engines = [Streaming(), Streaming()]
    with routed(*engines) as router:
        assert router.capabilities.streaming

        async def scene() -> None:
            tokens: list[int] = []
            async for delta in router.astream(request(3, 40)):
                tokens += delta.tokens
                if len(tokens) == 10:
                    next(each for each in engines if each.num_open).is_dead = True
                reason = delta.stop_reason
            assert tuple(tokens) == expected(request(3, 40))
            assert reason == "length"

        asyncio.run(scene())
        assert router.status().metrics["router_num_requests_moved"] == 1


def test_a_grammar_is_begun_again_on_a_server_that_cannot_continue_it():
    engines = [ScriptedEngine(resumable=False), ScriptedEngine(resumable=False)]
    with routed(*engines) as router:
        plain = request(0, 40)
        asked = replace(plain, sampling=replace(plain.sampling, grammar=Grammar("regex", "a*")))

        def kill() -> None:
            next(each for each in engines if each.num_open).is_dead = True

        [response] = asyncio.run(interrupted(router, [asked], engines, kill))
        assert is_whole(asked, response)


def test_what_servers_did_with_images_is_added_up():
    told = [{"num_media_computed": 3, "media_tower_s": 0.5, "kv_used": 0.2}, {"kv_used": 0.4}]
    assert common_metrics(told) == {"num_media_computed": 3, "media_tower_s": 0.5, "kv_used": pytest.approx(0.3)}
    assert not [name for name in common_metrics(told[1:]) if "media" in name]
