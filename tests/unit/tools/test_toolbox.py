"""The tools of a run: calls, failures, limits, rewards and rows."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from patience import long_enough
from tools.boxes import ask, call, row, toolbox

from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.errors import ConfigError, DataError, RewardFailed
from headwater.core.tool_calls import MalformedCall, ToolCall
from headwater.tools import BaseTool, ToolError, ToolResponse, ToolUnavailable, running
from headwater.tools import session as session_module
from headwater.tools.toolbox import Toolbox


@pytest.fixture
def _short_grace(monkeypatch):
    monkeypatch.setattr(running, "GRACE_S", 0.05)
    monkeypatch.setattr(session_module, "GRACE_S", 0.05)


def schema(name: str, **properties: Any) -> dict[str, Any]:
    return {"name": name, "description": "A tool.", "parameters": {"type": "object", "properties": properties}}


class Account(BaseTool):
    """Keeps a sum for each episode, and gives a reward for it."""

    tool_schema = schema("account", by={"type": "integer"})

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, int] = {}
        self.log: list[str] = []

    async def create(self, instance_id: str, start: int = 0) -> None:
        self.sums[instance_id] = start
        self.log.append("create")

    def execute(
        self, instance_id: str, parameters: dict[str, Any], factor: int = 1
    ) -> tuple[str, float, dict[str, Any]]:
        self.sums[instance_id] += factor * parameters.get("by", 1)
        self.log.append("execute")
        return str(self.sums[instance_id]), 0.25, {"sum": self.sums[instance_id], "unit": "EUR"}

    async def calc_reward(self, instance_id: str, scale: float = 1.0) -> float:
        return self.sums[instance_id] * scale

    def release(self, instance_id: str) -> None:
        del self.sums[instance_id]
        self.log.append("release")


def test_state_lives_for_one_episode_and_rows_give_arguments():
    tool = Account()
    box = toolbox(tool)
    kwargs = {"create_kwargs": {"start": 10}, "execute_kwargs": {"factor": 2}, "calc_reward_kwargs": {"scale": 0.5}}

    async def episode(uid: str, tools_kwargs: dict[str, Any]):
        async with box.open(row(uid, tools_kwargs=tools_kwargs)) as session:
            results = [await session.call(call("account", by=3)) for _ in range(2)]
            return results, await session.rewards(), session.counts

    async def run():
        return await asyncio.gather(episode("a", {"account": kwargs}), episode("b", {}))

    (first, rewards, counts), (second, other_rewards, _) = asyncio.run(run())
    assert [each.text for each in first] == ["16", "22"]
    assert rewards == {"account": 11.0}
    assert (first[0].reward, dict(first[0].metrics)) == (0.25, {"sum": 16.0})
    assert [each.text for each in second] == ["3", "6"]
    assert other_rewards == {"account": 6.0}
    assert counts == {"calls": 2}
    assert box.counts == {"calls": 4}
    assert tool.sums == {}


def test_an_episode_without_calls_creates_nothing_unless_it_has_a_reward():
    tool = Account()
    box = toolbox(tool)

    async def run() -> dict[str, float]:
        async with box.open(row()):
            pass
        assert tool.log == []
        async with box.open(row()) as session:
            return await session.rewards()

    assert asyncio.run(run()) == {"account": 0.0}
    assert tool.log == ["create", "release"]


def test_parallel_first_calls_create_once():
    tool = Account()
    box = toolbox(tool)

    async def run() -> list[str]:
        async with box.open(row()) as session:
            results = await asyncio.gather(*(session.call(call("account", by=1)) for _ in range(5)))
        return sorted(each.text for each in results)

    assert asyncio.run(run()) == ["1", "2", "3", "4", "5"]
    assert tool.log.count("create") == tool.log.count("release") == 1


def test_the_id_that_create_returns_is_used():
    seen = []

    class Own:
        tool_schema = schema("own")

        async def create(self, instance_id, **kwargs):
            return "mine", ToolResponse("")

        async def execute(self, instance_id, parameters, **kwargs):
            seen.append(instance_id)
            return SimpleNamespace(text="fine", image=None)

        async def release(self, instance_id, **kwargs):
            seen.append(instance_id)

    assert ask(toolbox(Own), call("own"))[0].text == "fine"
    assert seen == ["mine", "mine"]


RESULTS = {
    "text": ("text", "text"),
    "number": (42, "42"),
    "list": ([1, "é"], '[1, "é"]'),
    "response": (ToolResponse("text", reward=1.0), "text"),
    "one": (("text",), "text"),
    "none": (None, "bad_result"),
    "bytes": (b"text", "bad_result"),
    "object": (object(), "bad_result"),
    "set": ({"a": {1}}, "bad_result"),
    "nested": ((("text", 1.0), None, None), "bad_result"),
    "four": (("text", 1.0, {}, 1), "bad_result"),
    "nan": (("text", float("nan"), {}), "bad_result"),
    "reward": (("text", "high", {}), "bad_result"),
    "metrics": (("text", 1.0, [1]), "bad_result"),
    "image": (SimpleNamespace(text="text", image=[b"png"]), "bad_result"),
}


def test_shapes_of_results():
    def give(kind: str) -> Any:
        """Return something."""
        return RESULTS[kind][0]

    results = ask(toolbox(give), *(call("give", kind=kind) for kind in RESULTS))
    assert [each.failure or each.text for each in results] == [expected for _, expected in RESULTS.values()]
    assert results[3].reward == 1.0


class Faulty(BaseTool):
    tool_schema = schema("faulty", how={"type": "string"})
    is_hanging: asyncio.Event | None = None

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        how = parameters.get("how")
        if how == "raises":
            raise KeyError("no such thing")
        if how == "refuses":
            raise ToolError("the shop is closed on Sundays")
        if how == "is down":
            raise ToolUnavailable("the service is down")
        if how == "hangs":
            if self.is_hanging is not None:
                self.is_hanging.set()
            await asyncio.sleep(3600)
        if how == "exits":
            raise SystemExit(3)
        return "x" * 5_000_000

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        raise RuntimeError("cannot be released")


def test_every_failure_is_counted_and_told_to_the_model():
    long_enough(_check_failures, 0.05, 5.0)


def _check_failures(limit_s: float) -> None:
    box = toolbox(Faulty(), timeout_s=limit_s, max_result_tokens=90)
    calls = [call("faulty", how=how) for how in ("raises", "refuses", "is down", "hangs", "megabytes")]
    calls += [
        call("faulti"),
        call("faulty", how=3),
        call("faulty", hwo="x"),
        MalformedCall("1", "<tool_", "it has no end"),
    ]
    results = ask(box, *calls)
    assert [each.failure for each in results] == [
        "raised", "raised", "unavailable", "timed_out", None,
        "unknown_tool", "bad_arguments", "bad_arguments", "malformed",
    ]  # fmt: skip
    assert [each.text for each in results[:4]] == [
        "Error: faulty raised KeyError: 'no such thing'",
        "Error: the shop is closed on Sundays",
        "Error: faulty is not available: the service is down",
        f"Error: faulty did not finish within {limit_s:g} s",
    ]
    assert len(results[4].text) < 1000
    assert "characters removed" in results[4].text
    assert [each.text for each in results[5:]] == [
        "Error: there is no tool 'faulti'; did you mean 'faulty'? known: faulty",
        "Error: faulty: how must be of type string, not 3",
        "Error: faulty: there is no argument 'hwo'; did you mean 'how'? known: how",
        "Error: the tool call could not be read: it has no end",
    ]
    assert box.counts == {
        "calls": 9, "raised": 2, "unavailable": 1, "timed_out": 1, "truncated": 1, "unknown_tool": 1,
        "bad_arguments": 2, "malformed": 1, "release_failed": 1,
    }  # fmt: skip


@pytest.mark.usefixtures("_short_grace")
def test_a_plain_function_neither_blocks_the_event_loop_nor_outlives_its_limit():
    ended = threading.Event()

    def loop_forever() -> str:
        """Compute for ever."""
        try:
            while True:
                pass
        finally:
            ended.set()

    async def run(limit_s: float) -> int:
        ticks = 0
        async with toolbox(loop_forever, timeout_s=limit_s).open(row()) as session:
            task = asyncio.ensure_future(session.call(call("loop_forever")))
            while not task.done():
                await asyncio.sleep(0.01)
                ticks += 1
            assert task.result().failure == "timed_out"
        return ticks

    def check(limit_s: float) -> None:
        assert asyncio.run(run(limit_s)) > 3
        assert ended.wait(60)

    long_enough(check, 0.2, 5.0)


@pytest.mark.usefixtures("_short_grace")
def test_calls_that_never_end_hold_their_slots_and_no_more():
    """A thread that blocks in C code cannot be interrupted, so the number of such threads must have a limit."""

    def check(limit_s: float) -> None:
        free = threading.Event()

        def block() -> str:
            """Wait."""
            free.wait(60)
            return "done"

        box = toolbox(block, timeout_s=limit_s, max_concurrent=3)
        before = threading.active_count()

        async def run():
            async with box.open(row()) as session:
                results = await asyncio.gather(*(session.call(call("block")) for _ in range(10)))
                assert threading.active_count() <= before + 3
                free.set()
                while True:  # the blocked calls end, and the tool works again
                    result = await session.call(call("block"))
                    if result.failure is None:
                        return results
                    await asyncio.sleep(0.01)

        try:
            kinds = [each.failure for each in asyncio.run(run())]
        finally:
            free.set()
        assert kinds.count("timed_out") == 3
        assert kinds.count("unavailable") == 7

    long_enough(check, 0.1, 5.0)  # a thread that does not block yet when the limit passes can be interrupted


def test_concurrent_calls_of_one_tool_are_limited_over_all_episodes():
    running_now, most = 0, 0

    async def work() -> str:
        """Work."""
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.001)
        running_now -= 1
        return "ok"

    box = toolbox(work, max_concurrent=4)

    async def episode(number: int) -> None:
        async with box.open(row(str(number))) as session:
            assert (await session.call(call("work"))).failure is None

    async def run() -> None:
        await asyncio.gather(*(episode(number) for number in range(50)))

    asyncio.run(run())
    assert most == 4


def test_a_failed_reward_is_never_a_number():
    class Wrong(BaseTool):
        tool_schema = schema("wrong")

        async def execute(self, instance_id, parameters):
            return "ok"

        async def calc_reward(self, instance_id, value=None):
            if value == "raise":
                raise ValueError("no reward")
            if value == "hang":
                await asyncio.sleep(3600)
            return value

    async def reward(limit_s: float, value: Any) -> Any:
        prompt = row(tools_kwargs={"wrong": {"calc_reward_kwargs": {"value": value}}})
        async with toolbox(Wrong, timeout_s=limit_s).open(prompt) as session:
            return await session.rewards()

    assert asyncio.run(reward(60.0, None)) == {}
    assert asyncio.run(reward(60.0, 2)) == {"wrong": 2.0}
    for limit_s, value, expected in (
        (60.0, "raise", "raised ValueError: no reward"),
        (0.05, "hang", "no result within 0.05 s"),
        (60.0, "1.0", "returned '1.0'"),
        (60.0, float("nan"), "returned nan"),
    ):
        with pytest.raises(RewardFailed, match=f"row row: calc_reward of tool wrong.*{expected}"):
            asyncio.run(reward(limit_s, value))


def test_rows_select_tools():
    def one() -> str:
        """The first."""
        return "1"

    def two() -> str:
        """The second."""
        return "2"

    box = toolbox(one, two)
    chosen = row(extra_info={"tool_selection": ["two"]})
    assert [each["function"]["name"] for each in box.schemas(chosen)] == ["two"]
    assert [each["function"]["name"] for each in box.schemas(row())] == ["one", "two"]
    result = ask(box, call("one"), prompt=chosen)[0]
    assert (result.failure, result.text) == ("unknown_tool", "Error: there is no tool 'one'; known: two")


def test_rows_that_name_what_does_not_exist_are_refused():
    box = toolbox(Account(), Faulty())
    for fields, expected in (
        ({"extra_info": {"tool_selection": ["acount"]}}, "did you mean 'account'"),
        ({"extra_info": {"tool_selection": "account"}}, "must be a list"),
        ({"tools_kwargs": {"acount": {}}}, "tools_kwargs names the tool 'acount'.*did you mean 'account'"),
        ({"tools_kwargs": {"account": 3}}, "tools_kwargs.account = 3: must be a mapping"),
        ({"tools_kwargs": {"account": {"create": {}}}}, r"tools_kwargs.account.create: no such entry"),
        ({"tools_kwargs": {"account": {"create_kwargs": 3}}}, "create_kwargs = 3: must be a mapping"),
        ({"tools_kwargs": {"account": {"create_kwargs": {"begin": 1}}}}, "create of tool account does not take begin"),
        ({"tools_kwargs": {"faulty": {"create_kwargs": {"begin": 1}}}}, "create of tool faulty does not take begin"),
    ):
        with pytest.raises(DataError, match=f"row r: .*{expected}"):
            box.check_row(row("r", **fields))


def test_a_session_cannot_be_used_after_its_end():
    async def run() -> None:
        box = toolbox(Account())
        async with box.open(row()) as session:
            pass
        with pytest.raises(ValueError, match="after its session had ended"):
            await session.call(call("account"))

    asyncio.run(run())


def test_a_call_that_is_running_when_the_session_ends_is_cancelled():
    tool = Faulty()

    async def run():
        tool.is_hanging = asyncio.Event()
        async with toolbox(tool, timeout_s=60).open(row()) as session:
            task = asyncio.ensure_future(session.call(call("faulty", how="hangs")))
            await tool.is_hanging.wait()
        return await task, session.counts

    result, counts = asyncio.run(run())
    assert result.failure == "unavailable"
    assert counts == {"calls": 1, "cancelled": 1, "release_failed": 1}


def test_names_are_unique_and_things_that_are_no_tools_are_refused():
    with pytest.raises(ConfigError, match="the name 'account' is taken by tool Account"):
        toolbox(Account(), Account())
    for thing, expected in ((3, "3 is not a tool"), (dict, "class dict has no execute method")):
        with pytest.raises(ConfigError, match=expected):
            toolbox(thing)
    assert Toolbox.from_config(ToolsConfig(), SandboxConfig(), None) is None  # type: ignore[arg-type]


def test_a_tool_is_checked_before_the_run():
    class Down(BaseTool):
        tool_schema = schema("down")

        async def check(self) -> None:
            raise ToolUnavailable("its service does not answer")

    class PlainlyDown(Down):
        def check(self) -> None:  # type: ignore[override]
            raise ToolUnavailable("its service does not answer")

    class Foreign:
        """A tool for another framework, whose method ``check`` means something else."""

        tool_schema = schema("foreign")

        def check(self, parameters: object) -> bool:
            return False

        def execute(self, instance_id: str, parameters: object) -> str:
            return "ok"

    for tool in (Down, PlainlyDown):
        with pytest.raises(ConfigError, match="tool down: its service does not answer"):
            toolbox(tool).check()
    toolbox(Foreign()).check()


@pytest.mark.usefixtures("_short_grace")
def test_a_plain_close_is_called_and_cannot_hold_up_the_end(monkeypatch, caplog):
    class Closing(Account):
        def close(self) -> None:  # type: ignore[override]
            self.log.append("close")
            self.closed_by = threading.current_thread()
            self.may_end.wait(600)

    for ends, num_warnings in ((True, 0), (False, 1)):
        monkeypatch.setattr("headwater.tools.toolbox._CLOSE_LIMIT_S", 60.0 if ends else 1.0)
        tool = Closing()
        tool.may_end = threading.Event()
        if ends:
            tool.may_end.set()
        ask(toolbox(tool), call("account"))
        tool.may_end.set()
        assert tool.log == ["create", "execute", "release", "close"]
        assert tool.closed_by is not threading.current_thread()
        assert sum("could not be closed" in each.getMessage() for each in caplog.records) == num_warnings


def test_an_async_tool_that_blocks_is_named(caplog):
    async def block() -> str:
        """Block."""
        time.sleep(0.6)  # noqa: ASYNC251 - the mistake that is to be found
        return "ok"

    assert ask(toolbox(block), ToolCall("1", "block", {}), ToolCall("2", "block", {}))[0].text == "ok"
    warnings = [each.getMessage() for each in caplog.records if "block" in each.getMessage()]
    assert len(warnings) == 1
    assert "blocked the event loop" in warnings[0]
