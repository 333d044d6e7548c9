"""``ToolSession``: the tools of one episode, from the first call to the release of everything it used."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headwater.core.errors import RewardFailed
from headwater.core.records import REWARD_RULE, Prompt, is_reward
from headwater.core.registry import nearest
from headwater.core.tool_calls import MalformedCall, ToolCall, ToolFailure, ToolResult
from headwater.data.media import MediaSettings
from headwater.tools.base import ToolError, ToolUnavailable
from headwater.tools.loaded import LoadedTool
from headwater.tools.results import BadResult, read_result_apart
from headwater.tools.running import GRACE_S, CallTimedOut
from headwater.tools.schema import WrongArguments

logger = logging.getLogger(__name__)


class ToolSession:
    """The calls of one episode.

    ``counts`` has the number of ``calls``, of their failures by kind (``ToolFailure``), and of ``cancelled`` calls; and
    beside these ``truncated`` results and ``release_failed`` tools. A call that is counted under none of the failures
    and was not cancelled had a regular result.
    """

    def __init__(
        self, tools: Mapping[str, LoadedTool], prompt: Prompt, totals: Counter[str], media: MediaSettings | None = None
    ) -> None:
        """``media`` says how images and videos are read; None if the model takes only text."""
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        """Time that calls took, including the wait for a free slot."""
        self._tools = tools
        self._totals = totals
        self._media = media
        episode_id = f"{prompt.uid}-{uuid.uuid4().hex}"
        self._instances = {
            name: _Instance(tool, prompt.tools_kwargs.get(name, {}), episode_id, self._add)
            for name, tool in tools.items()
        }
        self._uid = prompt.uid
        self._active: set[asyncio.Task[ToolResult]] = set()
        self._is_released = False

    async def call(self, call: ToolCall | MalformedCall) -> ToolResult:
        """The result of one call. Whatever a tool or the model does wrong is a result with a ``failure``."""
        if self._is_released:
            raise ValueError(f"episode {self._uid}: a tool was called after its session had ended")
        self._add("calls")
        began = asyncio.get_running_loop().time()
        task = asyncio.ensure_future(self._result(call))
        self._active.add(task)
        task.add_done_callback(self._active.discard)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            self._add("cancelled")
            await asyncio.wait({task}, timeout=2 * GRACE_S)
            raise
        if task.cancelled():  # by release(): the episode ended during the call
            self._add("cancelled")
            return ToolResult("Error: the episode has ended.", failure="unavailable")
        result = task.result()
        if result.failure is not None:
            self._add(result.failure)
        self.seconds += asyncio.get_running_loop().time() - began
        return result

    async def rewards(self) -> dict[str, float]:
        """The reward of every tool that gives one, by the tool's name; ``RewardFailed`` if one cannot be computed."""
        names = [name for name, tool in self._tools.items() if tool.has_own("calc_reward")]
        values = await asyncio.gather(*(self._reward(self._instances[name]) for name in names))
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    async def release(self) -> None:
        """End all calls, and release every tool that was created. A second call does nothing."""
        if self._is_released:
            return
        self._is_released = True
        active = set(self._active)
        for task in active:
            task.cancel()
        if active:
            await asyncio.wait(active, timeout=2 * GRACE_S)
        await asyncio.gather(*(instance.release() for instance in self._instances.values()))

    def _add(self, key: str) -> None:
        self.counts[key] += 1
        self._totals[key] += 1

    async def _result(self, call: ToolCall | MalformedCall) -> ToolResult:
        loaded = None if isinstance(call, MalformedCall) else self._tools.get(call.name)
        if isinstance(call, MalformedCall):
            result = _failure("malformed", f"the tool call could not be read: {call.reason}")
        elif loaded is None:
            hint = nearest(call.name, list(self._tools))
            result = _failure("unknown_tool", f"there is no tool {call.name[:64]!r}; {hint}")
        else:
            result = await self._attempt(loaded, call)
        # Messages about a wrong call quote what the model wrote, so they are cut like results.
        cutting = loaded or next(iter(self._tools.values()), None)
        if cutting is None:
            return result
        text, is_cut = cutting.cut(result.text)
        if is_cut:
            self._add("truncated")
        return replace(result, text=text)

    async def _attempt(self, loaded: LoadedTool, call: ToolCall) -> ToolResult:
        name, timeout_s = loaded.name, loaded.limits.timeout_s
        try:
            arguments = loaded.schema.check(call.arguments)
            value = await self._instances[name].execute(arguments)
            result = await read_result_apart(value, self._media)
            if result.media and self._media is None:
                raise BadResult("returned an image or a video, and the model takes only text; return text")
            loaded.note_available()
            return result
        except WrongArguments as error:
            return _failure("bad_arguments", f"{name}: {error}")
        except CallTimedOut:
            return _failure("timed_out", f"{name} did not finish within {timeout_s:g} s")
        except ToolUnavailable as error:
            loaded.note_unavailable(error)
            return _failure("unavailable", f"{name} is not available: {error}")
        except BadResult as error:
            loaded.warn_once("bad_result", str(error))
            return _failure("bad_result", f"{name} returned no valid result")
        except ToolError as error:
            return _failure("raised", str(error))
        except Exception as error:  # a tool may raise anything; it becomes a counted failure
            logger.info("tool %s raised", name, exc_info=True)
            return _failure("raised", f"{name} raised {type(error).__name__}: {error}")

    async def _reward(self, instance: _Instance) -> float | None:
        place = f"row {self._uid}: calc_reward of tool {instance.loaded.name}"
        try:
            value = await instance.reward()
        except CallTimedOut as error:
            limit = instance.loaded.limits.timeout_s
            raise RewardFailed(f"{place}: no result within {limit:g} s; raise tools.timeout_s") from error
        except Exception as error:  # a tool may raise anything
            raise RewardFailed(f"{place} raised {type(error).__name__}: {error}") from error
        if value is None:
            return None
        try:
            number = float(value) if not isinstance(value, (str, bytes)) else float("nan")
        except (TypeError, ValueError):
            number = float("nan")
        if not is_reward(number):
            raise RewardFailed(f"{place} returned {value!r}; it {REWARD_RULE}")
        return number


def _failure(kind: ToolFailure, text: str) -> ToolResult:
    return ToolResult(f"Error: {text}", failure=kind)


class _Instance:
    """One tool in one episode. It is created before its first call; whatever was created is released exactly once."""

    def __init__(
        self, loaded: LoadedTool, kwargs: Mapping[str, Any], episode_id: str, add: Callable[[str], None]
    ) -> None:
        self.loaded = loaded
        self._kwargs = kwargs
        self._episode_id = episode_id
        self._add = add
        self._num_created = 0
        self._id = ""
        self._creating = asyncio.Lock()

    async def execute(self, parameters: dict[str, Any]) -> Any:
        return await self._call("execute", parameters)

    async def reward(self) -> Any:
        return await self._call("calc_reward")

    async def _call(self, method: str, *args: Any) -> Any:
        async with self._creating:  # parallel first calls wait for one creation
            if not self._id:
                await self._create()
        return await self.loaded.run(partial(self._bound(method), self._id, *args, **self._given(method)))

    async def _create(self) -> None:
        """A creation that failed is tried again by the next call, under another id."""
        # All tools of an episode have the same id, so that they can share what belongs to it.
        self._num_created += 1
        attempt = f"-{self._num_created}" if self._num_created > 1 else ""
        instance_id = f"{self._episode_id}{attempt}"
        if not self.loaded.has_own("create"):
            self._id = instance_id
            return
        create = partial(self._bound("create"), instance_id, **self._given("create"))
        # An interrupted creation might be complete or not, so it is never interrupted. One that is complete only after
        # the time limit is released then.
        made = await self.loaded.run(create, on_late=lambda late: self._release_late(id_of(late, instance_id)))
        self._id = id_of(made, instance_id)

    async def release(self) -> None:
        if self._id:
            instance_id, self._id = self._id, ""
            await self._release(instance_id)

    def _release_late(self, instance_id: str) -> None:
        self.loaded.in_background(self._release(instance_id))

    async def _release(self, instance_id: str) -> None:
        if not self.loaded.has_own("release"):
            return
        try:
            await self.loaded.run_release(partial(self._bound("release"), instance_id, **self._given("release")))
        except CallTimedOut:
            self._release_failed(f"did not finish within {self.loaded.limits.timeout_s:g} s")
        except Exception as error:  # noqa: BLE001  a tool may raise anything
            self._release_failed(f"raised {type(error).__name__}: {error}")

    def _release_failed(self, what: str) -> None:
        self._add("release_failed")
        self.loaded.warn_once("release", f"was not released in episode {self._episode_id}: release {what}")

    def _bound(self, method: str) -> Any:
        return getattr(self.loaded.tool, method)

    def _given(self, method: str) -> Mapping[str, Any]:
        given: Mapping[str, Any] = self._kwargs.get(f"{method}_kwargs") or {}
        return given


def id_of(made: Any, given: str) -> str:
    """The instance id that ``create`` returned, alone or first in a tuple as in verl, or else the one it was given."""
    first = made[0] if isinstance(made, tuple) and made else made
    return first if isinstance(first, str) and first else given
