"""One episode at the endpoint: its secret address, the calls it answers, its limits, and the reward it is told."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from headwater.chat.parsers import ToolCallParser
from headwater.core.errors import HeadwaterError, RequestError, RolloutFailed
from headwater.core.records import SamplingParams
from headwater.serving.errors import ApiError
from headwater.serving.prompt import MAX_CHARACTERS_PER_TOKEN
from headwater.workflows.agents.calls import ChatCall
from headwater.workflows.agents.replies import CallReply
from headwater.workflows.agents.transcript import Draft, NoRoom, Transcript
from headwater.workflows.episode import Episode

T = TypeVar("T")

log = logging.getLogger(__name__)

_MOST_NOTES = 32

Limit = Literal["room", "turns"]


@dataclass(frozen=True)
class SessionRules:
    """What the calls of every episode have in common."""

    max_turns: int
    """Replies in one episode."""
    client_sampling: Literal["ignore", "refuse"]
    parser: Callable[[], ToolCallParser]
    """The parser of tool calls. Called when a client sends tools."""
    noted: set[str]
    """Settings of clients that the log has said are replaced."""


class Session:
    """Answers the calls of one episode until it is closed."""

    def __init__(self, episode: Episode, rules: SessionRules) -> None:
        self.id = secrets.token_urlsafe(18)
        self.key = f"hw-{secrets.token_urlsafe(18)}"
        self.transcript = Transcript(episode)
        self.counts: Counter[str] = Counter()
        """Calls by how they ended: ``answered``, ``disconnected``, or the code of an error."""
        self.given: Mapping[str, Any] | None = None
        """What the agent posted as its reward."""
        self.is_finished = asyncio.Event()
        """Set when the agent has called ``finish``."""
        self.limit: Limit | None = None
        """The limit that a call has reached. What the agent does afterwards is not an error."""
        self.engine_error: RolloutFailed | None = None
        self._episode = episode
        self._rules = rules
        self._num_running = 0
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def sampling(self) -> SamplingParams:
        return self._episode.context.sampling

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count how a call ends."""
        try:
            yield
        except ApiError as error:
            self.counts[error.code or "bad_request"] += 1
            raise
        except RolloutFailed:
            self.counts["engine_failed"] += 1
            raise
        except asyncio.CancelledError:
            self.counts["disconnected"] += 1
            raise
        self.counts["answered"] += 1

    async def answer(self, call: ChatCall) -> CallReply:
        """The model's reply to a call. It becomes part of the transcript when it is complete."""
        if self._is_closed:  # while the body was read
            raise episode_ended()
        self._check(call)
        parser = self._parser() if call.tools.schemas else None
        drafts: list[Draft] = []
        self._num_running += call.num_choices
        try:
            for _ in range(call.num_choices):
                drafts.append(self._open(call))  # noqa: PERF401  those that are open are closed if one fails
            replies = (self._generate(draft, call) for draft in drafts)
            await self._until_closed(_all(replies))
            reply = CallReply(call, [draft.piece for draft in drafts], parser)
            for draft, name, message in zip(drafts, reply.completion_ids, reply.messages, strict=True):
                draft.commit(name, message)
            return reply
        finally:
            self._num_running -= call.num_choices
            for draft in drafts:
                draft.close()

    async def close(self) -> None:
        """End the calls that are running, and wait until they have ended."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check(self, call: ChatCall) -> None:
        for each in call.replaced:
            if self._rules.client_sampling == "refuse":
                raise ApiError(
                    f"{each}: this run samples with its own settings (rollout.temperature, ...); remove it",
                    code="sampling_refused",
                )
            if each not in self._rules.noted and len(self._rules.noted) < _MOST_NOTES:
                self._rules.noted.add(each)
                log.warning("the agent asked for %s, which has no effect: the run's own settings are used", each)
        if self.transcript.num_replies + self._num_running + call.num_choices > self._rules.max_turns:
            self.limit = "turns"
            raise ApiError(
                f"the episode has reached rollout.workflow_args.max_turns = {self._rules.max_turns} replies; "
                "end it, or raise max_turns",
                code="max_turns_exceeded",
            )

    def _parser(self) -> ToolCallParser:
        try:
            return self._rules.parser()
        except HeadwaterError as error:  # the chat template does not show how this model writes calls
            raise ApiError(str(error), param="tools", code="unsupported") from error

    def _open(self, call: ChatCall) -> Draft:
        try:
            self._check_size(call)
            return self.transcript.open(call.messages, call.template_args)
        except NoRoom as error:
            self.limit = "room"
            raise ApiError(str(error), param="messages", code="context_length_exceeded") from error
        except RolloutFailed as error:  # for example a template that refuses two messages of the same role
            raise ApiError(str(error), param="messages", code="bad_messages") from error

    def _check_size(self, call: ChatCall) -> None:
        """Refuse messages that are certainly too long before they are tokenised, which all episodes would wait for."""
        context, prompt = self._episode.context, self._episode.prompt
        num_tokens = max(context.max_prompt_tokens, len(prompt.tokens)) + context.sampling.max_new_tokens
        num_characters = sum(len(message["content"]) for message in call.messages)
        if num_characters > MAX_CHARACTERS_PER_TOKEN * num_tokens:
            raise NoRoom(
                f"the messages have {num_characters} characters, and an episode {num_tokens} tokens; shorten them"
            )

    async def _generate(self, draft: Draft, call: ChatCall) -> None:
        try:
            await draft.piece.reply(call.max_tokens, call.shape.rules.stops)
        except RequestError as error:  # longer than the engine's cache
            self.limit = "room"
            raise ApiError(str(error), param="messages", code="context_length_exceeded") from error
        except RolloutFailed as error:
            self.engine_error = error
            raise

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_closed:
                raise episode_ended() from None
            raise
        finally:
            task.cancel()  # the client may have disconnected
            self._tasks.discard(task)


def episode_ended() -> ApiError:
    return ApiError("this episode has ended; its address no longer answers", status=410, code="episode_ended")


async def _all(coroutines: Iterator[Coroutine[Any, Any, None]]) -> None:
    """Run all of them. After the first error the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
