"""Agents that fail in every way, as real processes: each ends in a named outcome, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from endpoint_agents import post
from endpoint_parts import KeyedEngine, context, episode
from patience import long_enough
from processes import is_running

from headwater.core.errors import AgentFailed, AgentTimedOut, ConfigError, RewardFailed, RolloutFailed
from headwater.core.protocols import EpisodeInput
from headwater.workflows import Episode
from headwater.workflows.agents.processes import ForkServer
from headwater.workflows.agents.server import EndpointServer
from headwater.workflows.agents.session import SessionRules
from headwater.workflows.endpoint import EndpointWorkflow


def children_of(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def until(is_so: Callable[[], object], limit_s: float = 60.0) -> None:
    ends = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.02)


async def failure(agent: str, kind: type[Exception], engine=None, **settings) -> str:
    with pytest.raises(kind) as caught:
        await episode(agent, engine or KeyedEngine(), **settings)
    assert type(caught.value) is kind
    return str(caught.value)


def test_every_way_to_fail_has_a_name(tmp_path):
    async def run() -> None:
        said = await failure("raises", AgentFailed)
        assert "row row, sample 0 raised KeyError: 'the tool is missing'" in said
        assert "in raises" in said  # the traceback
        said = await failure("exits", AgentFailed)
        assert "exited with status 3\ngiving up" in said
        assert "was killed by SIGKILL" in await failure("is_killed", AgentFailed)
        assert "got no reply from the model" in await failure("never_calls", AgentFailed)
        assert "is text" in await failure("rewards_text", RewardFailed)
        assert "is missing" in await failure("no_reward", RewardFailed, reward="agent")
        said = await failure("never_ends", ConfigError)
        assert "its parameter 'pids' is not known" in said

    asyncio.run(run())


def test_an_agent_that_never_ends_is_killed_with_what_it_started(tmp_path):
    def check(limit_s: float) -> None:
        pids = tmp_path / f"pids {limit_s:g}"
        said = asyncio.run(failure("never_ends", AgentTimedOut, timeout_s=limit_s, agent_args={"pids": str(pids)}))
        assert f"did not end within {limit_s:g} s; raise rollout.workflow_args.timeout_s" in said
        started = [int(pid) for pid in pids.read_text().split()]
        assert len(started) == 3
        until(lambda: not any(map(is_running, started)))

    long_enough(check, 2.0, 30.0)


def test_cancelling_an_episode_kills_its_agent_and_the_end_of_the_loop_all_others(tmp_path):
    pids = tmp_path / "pids"

    async def run() -> None:
        agents = [
            asyncio.create_task(episode("never_ends", KeyedEngine(), agent_args={"pids": str(pids)})) for _ in range(3)
        ]
        await asyncio.to_thread(until, lambda: pids.exists() and len(pids.read_text().splitlines()) == 3)
        agents[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await agents[0]

    asyncio.run(run())
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 9
    until(lambda: not any(map(is_running, started)))


def test_an_agent_that_runs_out_of_room_or_turns_ends_a_normal_episode():
    async def run() -> None:
        (full,) = await episode("until_full", KeyedEngine(), room=40)
        assert (full.stop_reason, full.info["ended_by"]) == ("length", "room")
        assert full.info["agent_calls"]["context_length_exceeded"] == 1
        assert len(full.tokens) - full.prompt_length <= 40
        assert full.reward == float(full.info["scored"][-1])  # the run's function
        (full,) = await episode("until_full", KeyedEngine(), room=40, reward="agent", truncated_reward=-2.0)
        assert full.reward == -2.0
        assert "truncated_reward" in await failure("until_full", RewardFailed, room=40, reward="agent")
        (turns,) = await episode("stubborn", KeyedEngine(), room=120, max_turns=3)
        assert (turns.stop_reason, turns.info["ended_by"], turns.info["num_turns"]) == ("length", "turns", 3)
        assert turns.info["agent_calls"] == {"answered": 3, "max_turns_exceeded": 1}

    asyncio.run(run())


def test_refused_calls_are_counted_and_do_no_harm():
    async def run() -> None:
        (one,) = await episode("meddles", KeyedEngine())
        assert one.info["codes"] == [
            [401, "invalid_api_key"], [401, "invalid_api_key"], [404, "unknown_episode"], [400, None],
            [400, None], [400, "unsupported"], [400, "unsupported"], [404, "unknown_path"],
            [400, "bad_messages"],
        ]  # fmt: skip
        assert one.info["agent_calls"] == {
            "answered": 1, "bad_request": 2, "unsupported": 2, "unknown_path": 1, "bad_messages": 1,
        }  # fmt: skip
        server = await EndpointServer.here("127.0.0.1", 0)
        assert server.refusals == {"invalid_api_key": 2, "unknown_episode": 1}

    asyncio.run(run())


def test_a_flood_of_calls_is_answered_up_to_the_limit():
    async def run() -> None:
        found = await episode("floods", KeyedEngine(delay_s=lambda request: 0.05), max_turns=8)
        assert len(found) == 8
        assert found[0].info["statuses"] == [200] * 8 + [400] * 12

    asyncio.run(run())


def test_a_call_that_is_hung_up_leaves_no_trace(tmp_path):
    """The agent hangs up when the engine has its request, and asks again when the engine has lost it."""

    class Telling(KeyedEngine):
        async def agenerate(self, request):
            (tmp_path / f"{len(self.requests)} came").touch()
            try:
                return await super().agenerate(request)
            finally:
                (tmp_path / f"{len(self.cancelled)} left").touch()

    async def run() -> None:
        engine = Telling()
        (one,) = await episode("hangs_up", engine, agent_args={"folder": str(tmp_path)})
        assert one.info["agent_calls"] == {"disconnected": 1, "answered": 1}
        assert engine.cancelled == [engine.requests[0].request_id]
        assert "SLOW" not in str(one.messages)

    asyncio.run(run())


def test_a_late_call_is_told_that_the_episode_has_ended(tmp_path):
    async def run() -> None:
        (one,) = await episode("late", KeyedEngine(), agent_args={"file": str(tmp_path / "invitation")})
        base_url, key = (tmp_path / "invitation").read_text().split()
        status, reply = await asyncio.to_thread(post, base_url, key, {"messages": [{"role": "user", "content": "Hi"}]})
        assert (status, reply["error"]["code"]) == (410, "episode_ended")
        assert one.info["num_turns"] == 1

    asyncio.run(run())


def test_an_error_of_the_engine_is_not_blamed_on_the_agent():
    class Broken:
        async def agenerate(self, request):
            raise RolloutFailed("the engine has failed")

    asyncio.run(failure("twice", RolloutFailed, Broken()))


def test_agents_reward_themselves_and_finish_later():
    async def run() -> None:
        (posted,) = await episode("posts_its_reward", KeyedEngine())
        assert (posted.reward, posted.info["note"]) == (0.25, "posted")
        (finished,) = await episode("finishes_later", KeyedEngine(), wait_for_finish=True)
        assert finished.reward == 0.75
        (made,) = await episode("Counting", KeyedEngine(), agent_args={"bonus": 0.5})
        assert (made.reward, made.info["told"], made.info["environment"]) == (1.5, "46", "default")
        (scored,) = await episode("no_reward", KeyedEngine())
        assert scored.reward == float(scored.info["scored"][-1])
        (scored,) = await episode("twice", KeyedEngine(["1", "8"]), reward="function")
        assert scored.reward == 8.0

    async def never_finishes(limit_s: float) -> None:
        said = await failure("no_reward", AgentTimedOut, wait_for_finish=True, timeout_s=limit_s)
        assert f"did not call finish within {limit_s:g} s" in said

    asyncio.run(run())
    long_enough(lambda limit_s: asyncio.run(never_finishes(limit_s)), 2.0, 30.0)


COMMAND = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from endpoint_agents import ask, post
row = json.load(sys.stdin)
url, key = sys.argv[2], os.environ["OPENAI_API_KEY"]
assert url == os.environ["OPENAI_BASE_URL"]
ask(url, key, row["messages"])
post(url, key, {"reward": len(sys.argv[3])}, "/reward")
sys.exit(int(row["ground_truth"] == "46") if "fail" in sys.argv else 0)
"""


def test_a_command_is_an_agent(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(COMMAND)
    argv = (sys.executable, str(program), str(Path(__file__).parent), "{base_url}", "{prompt}")

    async def run() -> None:
        (one,) = await episode("", KeyedEngine(), command=argv)
        assert one.reward == len("12+34=")
        assert "exited with status 1" in await failure("", AgentFailed, command=(*argv, "fail"))
        assert "exited with status 127\nno-such-program: No such file" in await failure(
            "", AgentFailed, command="no-such-program {base_url}"
        )

    asyncio.run(run())


def test_a_fork_server_that_dies_is_replaced():
    async def run() -> None:
        loop = asyncio.get_running_loop()
        hanging = asyncio.create_task(failure("sometimes_hangs", AgentFailed, prompt=tiny.prompt(columns={"hang": 1})))
        await asyncio.to_thread(until, lambda: ForkServer.running(loop))
        (server,) = ForkServer.running(loop)
        await asyncio.to_thread(until, lambda: children_of(server.pid))
        os.kill(server.pid, signal.SIGKILL)
        assert "the process that runs agents ended" in await hanging
        (one,) = await episode("sometimes_hangs", KeyedEngine())
        assert one.reward == 1.0

    asyncio.run(run())


def test_megabytes_are_refused_before_they_are_tokenised():
    async def run() -> None:
        (one,) = await episode("sends_megabytes", KeyedEngine())
        assert one.info["code"] == "context_length_exceeded"
        assert one.info["agent_calls"] == {"context_length_exceeded": 1, "answered": 1}

    asyncio.run(run())


def test_agents_on_other_machines_get_another_address():
    async def run(host: str, public_url: str) -> str:
        server = await EndpointServer.here(host, 0, public_url)
        rules = SessionRules(1, "ignore", "follow", lambda: None, set())
        made = Episode(context(), KeyedEngine(), EpisodeInput(tiny.prompt(), 0, rng_key=1))
        async with server.session(made, rules) as session:
            return server.base_url(session).replace(session.id, "ID")

    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/episodes/ID/v1", asyncio.run(run("127.0.0.1", "")))
    assert re.fullmatch(r"http://node7:\d+/episodes/ID/v1", asyncio.run(run("127.0.0.1", "http://node7")))
    assert asyncio.run(run("127.0.0.1", "https://node7:80/")) == "https://node7:80/episodes/ID/v1"
    with pytest.raises(ConfigError, match=r"rollout\.workflow_args\.host = 203\.0\.113\.9"):
        asyncio.run(run("203.0.113.9", ""))


def test_wrong_settings_are_named():
    here = context()
    for settings, words in [
        ({}, "neither is given"),
        ({"agent": "a.py:b", "command": "x"}, "both are given"),
        ({"agent": f"{Path(__file__).with_name('test_endpoint_fault.py')}:a"}, "no such file; did you mean"),
        ({"agent": "solve"}, "write it as"),
        ({"command": "x", "run_in": "thread"}, "a command runs in a process"),
        ({"command": "x", "python": "py"}, "is for agents in processes"),
        ({"command": "x", "public_url": "host:1"}, "must begin with http"),
    ]:
        with pytest.raises(ConfigError, match=words):
            EndpointWorkflow(here, **settings)
