"""Whatever happens in an episode, each created instance is released once, and the counts add up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tools.boxes import call, row, toolbox

from headwater.core.tool_calls import ToolFailure
from headwater.tools import BaseTool, ToolUnavailable, running
from headwater.tools import session as session_module
from headwater.tools.session import ToolSession

LIMIT_S = 0.03
BEHAVIOURS = ("ok", "raise", "unavailable", "bad", "hang", "slow", "stubborn")


def act_sync(how: str) -> Any:
    if how == "raise":
        raise ValueError("no")
    if how == "unavailable":
        raise ToolUnavailable("down")
    if how in ("hang", "stubborn", "slow"):
        time.sleep(0.06 if how != "slow" else 0.005)
    return None if how == "bad" else "text"


async def act(how: str) -> Any:
    if how == "hang":
        await asyncio.sleep(3600)
    if how == "slow":
        await asyncio.sleep(0.005)
    if how == "stubborn":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)
            return "late"
    return act_sync(how if how in ("raise", "unavailable", "bad") else "ok")


class Log:
    def __init__(self) -> None:
        self.created: Counter[str] = Counter()
        self.released: Counter[str] = Counter()


SCHEMA = {"parameters": {"type": "object", "properties": {"how": {"type": "string"}}}, "description": "Acts."}


class AsyncTool(BaseTool):
    def __init__(self, log: Log) -> None:
        super().__init__(tool_schema={"name": "async", **SCHEMA})
        self.log = log

    async def create(self, instance_id: str, how: str = "ok") -> None:
        await act(how)
        self.log.created[instance_id] += 1

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        assert self.log.created[instance_id] == 1
        assert self.log.released[instance_id] == 0
        return await act(parameters["how"])

    async def release(self, instance_id: str, how: str = "ok") -> None:
        self.log.released[instance_id] += 1
        await act(how)


class SyncTool(BaseTool):
    def __init__(self, log: Log) -> None:
        super().__init__(tool_schema={"name": "sync", **SCHEMA})
        self.log = log

    def create(self, instance_id: str, how: str = "ok") -> None:  # type: ignore[override]
        act_sync(how)
        self.log.created[instance_id] += 1

    def execute(self, instance_id: str, parameters: dict[str, Any]) -> Any:  # type: ignore[override]
        assert self.log.created[instance_id] == 1
        return act_sync(parameters["how"])

    def release(self, instance_id: str, how: str = "ok") -> None:  # type: ignore[override]
        self.log.released[instance_id] += 1
        act_sync(how)


def _has_threads() -> bool:
    return any(thread.name == "tool" for thread in threading.enumerate())


behaviours = st.sampled_from(BEHAVIOURS)
calls = st.lists(st.tuples(st.sampled_from(["async", "sync", "unknown"]), behaviours), max_size=4)
episodes = st.lists(
    st.fixed_dictionaries(
        {
            "create": behaviours,
            "release": behaviours,
            "turns": st.lists(calls, max_size=3),
            "cancel_after_s": st.none() | st.floats(0, 0.08),
            "raises": st.booleans(),
        }
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(autouse=True, scope="module")
def _short_grace():
    before = running.GRACE_S
    running.GRACE_S = session_module.GRACE_S = 0.01
    yield
    running.GRACE_S = session_module.GRACE_S = before


@given(episodes, st.integers(1, 3))
@hypothesis_settings(max_examples=25)
def test_each_created_instance_is_released_once(plan, max_concurrent):
    logs = [Log(), Log()]
    box = toolbox(AsyncTool(logs[0]), SyncTool(logs[1]), timeout_s=LIMIT_S, max_concurrent=max_concurrent)
    counts: list[Counter[str]] = []
    num_ok = 0

    async def ask(session: ToolSession, name: str, how: str) -> None:
        nonlocal num_ok
        result = await session.call(call(name, how=how))
        num_ok += result.failure is None  # here, because the episode may be cancelled before it gets the result

    async def episode(number: int, spec: dict[str, Any]) -> None:
        given_kwargs = {"create_kwargs": {"how": spec["create"]}, "release_kwargs": {"how": spec["release"]}}
        async with box.open(row(str(number), tools_kwargs={"async": given_kwargs, "sync": given_kwargs})) as session:
            counts.append(session.counts)
            for turn in spec["turns"]:
                await asyncio.gather(*(ask(session, name, how) for name, how in turn))
            if spec["raises"]:
                raise LookupError("the workflow has a bug")

    async def run() -> None:
        tasks = [asyncio.ensure_future(episode(number, spec)) for number, spec in enumerate(plan)]
        loop = asyncio.get_running_loop()
        for task, spec in zip(tasks, plan, strict=True):
            if spec["cancel_after_s"] is not None:
                loop.call_later(spec["cancel_after_s"], task.cancel)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, (asyncio.CancelledError, LookupError)), outcome
        # Creations in threads may still end, and are released then.
        deadline = loop.time() + 60
        while (_has_threads() or any(log.created != log.released for log in logs)) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await box.close()

    asyncio.run(run())
    for log in logs:
        assert log.created == log.released
        assert all(count == 1 for count in log.created.values())
    total = sum(counts, Counter())
    failures = sum(total[kind] for kind in get_args(ToolFailure))
    assert total == box.counts
    if not total["cancelled"]:
        assert total["calls"] == failures + num_ok
    assert total["calls"] >= failures + num_ok + total["cancelled"]
