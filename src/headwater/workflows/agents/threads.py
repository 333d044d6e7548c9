"""Agents in threads of this process: cheaper than processes, for agents that are trusted to end.

An async agent runs on one event loop in a separate thread, together with others; a sync agent has a thread for itself.
An agent that does not end cannot be killed: it is left alone, and its address no longer answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from headwater.core.errors import ConfigError
from headwater.core.registry import blaming, load_object
from headwater.workflows.agents.fork_server import chosen, plain, problem_of
from headwater.workflows.agents.runner import OFFERED, AgentEnd, AgentSettings, Invitation


class AgentThreads:
    def __init__(self, settings: AgentSettings) -> None:
        with blaming(f"rollout.workflow_args.agent = {settings.agent}"):
            self._agent = load_object(settings.agent)
        self._agent_args = dict(settings.agent_args)
        if problem := problem_of(self._agent, self._agent_args, list(OFFERED)):
            raise ConfigError([f"rollout.workflow_args.agent = {settings.agent}: {problem}"])
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, invitation: Invitation, timeout_s: float) -> AgentEnd:
        function, arguments = self._prepare(invitation)
        if inspect.iscoroutinefunction(function):
            ended = asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(_outcome_of(function, arguments), self._own_loop())
            )
        else:
            ended = asyncio.get_running_loop().create_future()
            start = threading.Thread(target=_in_thread, args=(function, arguments, ended), daemon=True)
            start.name = "headwater-agent"
            start.start()
        try:
            async with asyncio.timeout(timeout_s):
                return await ended
        except TimeoutError:
            return AgentEnd("timed_out", reason=f"did not end within {timeout_s:g} s")

    def _prepare(self, invitation: Invitation) -> tuple[Callable[..., Any], dict[str, Any]]:
        agent, agent_args = self._agent, self._agent_args
        if inspect.isclass(agent):
            made = agent(**agent_args)
            agent, agent_args = (made.run if hasattr(made, "run") else made), {}
        return agent, chosen(agent, {**invitation.offered(), **agent_args})

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="headwater-agents", daemon=True).start()
        return self._loop


async def _outcome_of(function: Callable[..., Any], arguments: dict[str, Any]) -> AgentEnd:
    try:
        return AgentEnd("returned", plain(await function(**arguments)))
    except BaseException as error:  # noqa: BLE001  an agent may raise anything, also CancelledError
        return _raised(error)


def _in_thread(function: Callable[..., Any], arguments: dict[str, Any], ended: asyncio.Future[AgentEnd]) -> None:
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):  # for example of a class with ``async def __call__``
            value = asyncio.run(_awaited(value))
        end = AgentEnd("returned", plain(value))
    except BaseException as error:  # noqa: BLE001  an agent may raise anything, also CancelledError
        end = _raised(error)

    def tell() -> None:
        if not ended.done():  # it may have timed out
            ended.set_result(end)

    with contextlib.suppress(RuntimeError):  # the run has ended, and with it the event loop
        ended.get_loop().call_soon_threadsafe(tell)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _raised(error: BaseException) -> AgentEnd:
    trace = "".join(traceback.format_exception(error))
    return AgentEnd("raised", reason=f"raised {type(error).__name__}: {error}", detail=trace)
