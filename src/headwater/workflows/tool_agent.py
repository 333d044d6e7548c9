"""The model calls tools: it writes calls, reads their results, and continues until it answers without a call.

The whole episode is one trajectory. The model is trained on everything it wrote, also on its calls, and not on the
results of the tools.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from headwater.config.constraints import AtLeast
from headwater.config.traits import WorkflowTraits
from headwater.core.errors import ConfigError, RolloutFailed
from headwater.core.records import Score, Trajectory
from headwater.core.registry import blaming, load_object
from headwater.core.tool_calls import MalformedCall, ParsedReply, ToolCall, ToolResult
from headwater.tools.running import call_method
from headwater.tools.session import ToolSession
from headwater.workflows import WORKFLOWS, Episode, WorkflowContext

Call = ToolCall | MalformedCall
EndedBy = Literal["answer", "assistant_turns", "user_turns", "turn_tokens", "room"]
"""Why a conversation ended; see docs/agents.md."""

_UNREADABLE = "unknown"
"""The name of a malformed call whose tool could not be read."""

_ARGUMENTS = "rollout.workflow_args"
_MAX_USER_CALLS = 256
"""Calls of the function that plays the user at the same time; a plain function has a thread for each."""


@dataclass(frozen=True)
class TurnLimits:
    """0 means no limit."""

    assistant_turns: int
    user_turns: int
    calls: int
    calls_per_turn: int
    turn_tokens: int

    def num_allowed(self, num_calls: int, num_before: int) -> int:
        """How many of the calls of a turn may run, if ``num_before`` calls were made in earlier turns."""
        left = max(0, self.calls - num_before) if self.calls else num_calls
        return min(num_calls, left, self.calls_per_turn or num_calls)


@dataclass
class Record:
    """What happened in one episode, for its ``info``."""

    turn_rewards: list[float] = field(default_factory=list)
    """The sum of the rewards of each turn's calls."""
    calls: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    num_executed: int = 0
    """Calls that a tool was asked to do. Calls over a limit are refused and do not count towards it."""
    num_user_turns: int = 0
    seconds: float = 0.0

    def add(self, calls: Sequence[Call], results: Sequence[ToolResult]) -> None:
        """The calls of the last turn."""
        for call, result in zip(calls, results, strict=True):
            self.calls[call.name or _UNREADABLE] += 1
            self.turn_rewards[-1] += result.reward or 0.0
            if result.failure is not None:
                self.failures[result.failure] += 1
            for name, value in result.metrics.items():
                self.metrics.setdefault(f"{call.name}/{name}", []).append(value)

    def info(self, episode: Episode, ended_by: EndedBy, rewards: Mapping[str, float]) -> dict[str, Any]:
        return {
            "num_turns": episode.num_turns,
            "num_user_turns": self.num_user_turns,
            "num_tool_calls": self.calls.total(),
            "tool_calls": dict(self.calls),
            "tool_failures": dict(self.failures),
            "tool_s": self.seconds,
            "tool_rewards": dict(rewards),
            "tool_metrics": {name: sum(values) / len(values) for name, values in self.metrics.items()},
            "ended_by": ended_by,
        }


@WORKFLOWS.register(WorkflowTraits(uses_tools=True))
class ToolAgentWorkflow:
    """Generate, call tools, tell the model the results, and again, until it answers, or a limit is reached.

    ``user`` names a function that plays the user: it is called with the messages and the prompt after each answer
    without a call, and returns the next user message, or None to end the conversation. A plain function is called in a
    thread.
    """

    def __init__(
        self,
        context: WorkflowContext,
        *,
        max_assistant_turns: Annotated[int, AtLeast(1)] = 8,
        max_user_turns: Annotated[int, AtLeast(0, "use 0 for no limit")] = 0,
        max_calls: Annotated[int, AtLeast(0, "use 0 for no limit")] = 0,
        max_calls_per_turn: Annotated[int, AtLeast(0, "use 0 for no limit")] = 16,
        max_turn_tokens: Annotated[int, AtLeast(0, "use 0 for no limit per turn")] = 0,
        user: str = "",
        tool_reward_weight: float = 0.0,
        tool_rewards_per_turn: bool = False,
    ) -> None:
        if context.tools is None or context.parser is None:
            raise ConfigError(
                ["rollout.workflow = tool_agent: needs tools; name some in tools.use, or in tools.config"]
            )
        _check(max_user_turns, user, tool_reward_weight, tool_rewards_per_turn)
        self._tools = context.tools
        self._parser = context.parser
        self._limits = TurnLimits(max_assistant_turns, max_user_turns, max_calls, max_calls_per_turn, max_turn_tokens)
        self._user = _load_user(user) if user else None
        self._user_slots = asyncio.Semaphore(_MAX_USER_CALLS)
        self._reward_weight = tool_reward_weight
        self._rewards_per_turn = tool_rewards_per_turn

    async def run(self, episode: Episode) -> Trajectory:
        record = Record()
        async with self._tools.open(episode.prompt) as session:
            ended_by = await self._converse(episode, session, record)
            score = await episode.score()
            rewards = await session.rewards()
        turn_scores = [self._reward_weight * each for each in record.turn_rewards]
        turn_scores[-1] += score.value + self._reward_weight * sum(rewards.values())
        return episode.finish(
            Score(sum(turn_scores), score.info),
            turn_scores=turn_scores if self._rewards_per_turn else None,
            info={**record.info(episode, ended_by, rewards), **({"score": score.value} if self._reward_weight else {})},
        )

    async def _converse(self, episode: Episode, session: ToolSession, record: Record) -> EndedBy:
        while True:
            await episode.reply(self._limits.turn_tokens or None)
            record.turn_rewards.append(0.0)
            reply = self._parser.parse(
                episode.raw_text,
                episode.prompt.tool_schemas,
                salt=f"{episode.sample}/{episode.num_turns}",
                in_reasoning=episode.begins_in_reasoning,
            )
            is_last = episode.num_turns >= self._limits.assistant_turns
            if reply.calls:
                if episode.room < 1:  # the model could not read the results
                    episode.stop_reason = "length"
                    return "room"
                episode.stop_reason = "tool_calls"
                if is_last:
                    return "assistant_turns"
                results = await self._call(episode, session, reply.calls, record)
                is_told = tell_results(episode, reply, results)
            else:
                if episode.stop_reason == "length":
                    return "turn_tokens" if episode.room else "room"
                if self._user is None or is_last:
                    return "answer"
                if self._limits.user_turns and record.num_user_turns >= self._limits.user_turns:
                    return "user_turns"
                message = await self._ask_user(episode)
                if message is None:
                    return "answer"
                record.num_user_turns += 1
                is_told = episode.tell([{"role": "user", "content": message}])
            if not is_told:
                return "room"

    async def _call(
        self, episode: Episode, session: ToolSession, calls: Sequence[Call], record: Record
    ) -> list[ToolResult]:
        """The results in the order of the calls, which run at the same time."""
        num_allowed = self._limits.num_allowed(len(calls), record.num_executed)
        began = time.monotonic()
        names = ", ".join(dict.fromkeys(call.name or _UNREADABLE for call in calls))
        with episode.doing(f"calling {names}", "calling_tools"):
            results = list(await asyncio.gather(*(session.call(call) for call in calls[:num_allowed])))
        record.seconds += time.monotonic() - began
        record.num_executed += num_allowed
        results += [self._refused(num_allowed)] * (len(calls) - num_allowed)
        record.add(calls, results)
        return results

    def _refused(self, num_allowed: int) -> ToolResult:
        per_turn, in_all = self._limits.calls_per_turn, self._limits.calls
        limit = f"{per_turn} calls per message" if num_allowed == per_turn > 0 else f"{in_all} calls per conversation"
        return ToolResult(f"Error: not called, because the limit of {limit} is reached.", failure="over_limit")

    async def _ask_user(self, episode: Episode) -> str | list[Any] | None:
        assert self._user is not None
        with episode.doing("waiting for the user's message"):
            async with self._user_slots:
                message = await call_method(
                    partial(self._user, [dict(each) for each in episode.messages], episode.prompt)
                )
        if message is not None and not isinstance(message, (str, list)):
            raise RolloutFailed(
                f"{_ARGUMENTS}.user: returned a {type(message).__name__}; return the user's next message as text, a "
                "list of parts for a message with images, or None to end the conversation"
            )
        return message


def tell_results(episode: Episode, reply: ParsedReply, results: Sequence[ToolResult]) -> bool:
    """Append the results of a reply's calls as ``tool`` messages. Returns False if they do not fit."""
    # A name that the model made up is not repeated: it may contain control tokens of the template.
    known = {schema["function"]["name"] for schema in episode.prompt.tool_schemas}
    names = [call.name if call.name in known else _UNREADABLE for call in reply.calls]
    messages = [
        {"role": "tool", "tool_call_id": call.call_id, "name": name, "content": result.content}
        for call, name, result in zip(reply.calls, names, results, strict=True)
    ]
    return episode.tell(messages, tool_calls=[_as_message(call) for call in reply.calls], content=reply.content)


def _as_message(call: Call) -> dict[str, Any]:
    """The call in the reply's ``tool_calls``. Some templates look up the call of every result, also of a bad one."""
    if isinstance(call, MalformedCall):
        call = ToolCall(call.call_id, call.name or _UNREADABLE, {})
    return call.as_message()


def _load_user(path: str) -> Callable[..., Any]:
    with blaming(f"{_ARGUMENTS}.user = {path}"):
        found = load_object(path)
    if not callable(found):
        raise ConfigError([f"{_ARGUMENTS}.user = {path}: is a {type(found).__name__}; name a function"])
    function: Callable[..., Any] = found
    return function


def _check(max_user_turns: int, user: str, weight: float, per_turn: bool) -> None:
    problems = []
    if max_user_turns and not user:
        problems.append(
            f"{_ARGUMENTS}.max_user_turns = {max_user_turns}: nothing reads this without {_ARGUMENTS}.user; name a "
            "function that plays the user, or remove this"
        )
    if per_turn and not weight:
        problems.append(
            f"{_ARGUMENTS}.tool_rewards_per_turn = true: nothing reads this, because tool_reward_weight = 0 ignores "
            "the rewards of tools; set it too, or remove this"
        )
    if problems:
        raise ConfigError(problems)
