"""One episode at the endpoint: its secret address, the calls it answers, its limits, and the reward it is told."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from headwater.chat.parsers import ToolCallParser
from headwater.core.errors import HeadwaterError, RequestError, RolloutFailed
from headwater.core.records import ModelRequest, SamplingParams
from headwater.serving.errors import ApiError
from headwater.serving.openai.chat import ChatReply
from headwater.serving.openai.plan import CallPlan, CallReading
from headwater.serving.output import Piece, whole
from headwater.serving.prompt import MAX_CHARACTERS_PER_TOKEN
from headwater.workflows.agents.calls import ChatCall
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


class CallReply:
    """The reply to a call whose choices are the last replies of ``episodes``."""

    def __init__(self, call: ChatCall, episodes: Sequence[Episode], parser: ToolCallParser | None) -> None:
        first = episodes[0]
        tokenizer = self._tokenizer = first.context.tokenizer
        # The same in every run, because some chat templates show the ids of tool calls, which begin with it.
        name = f"{first.data.rng_key} {first.name} {first.num_turns}"
        self.id = f"chatcmpl-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
        calls, shape = None, call.shape
        if parser is not None and call.tools.schemas:
            calls = CallReading(parser, call.tools.schemas, call.tools.is_parallel, first.begins_in_reasoning)
            # Many formats mark calls with special tokens. The parser leaves the others out.
            shape = replace(shape, rules=replace(shape.rules, skip_special_tokens=False))
        responses = [each.response for each in episodes if each.response is not None]
        self._pieces: list[Piece] = [whole(each, tokenizer, shape.rules) for each in responses]
        self._version = max((version for piece in self._pieces for version in piece.versions), default=0)
        request = ModelRequest(self.id, responses[0].input_tokens, SamplingParams(max_new_tokens=1), rng_key=0)
        requests = (request,) * len(responses)
        self._plan = CallPlan(self.id, call.model, int(time.time()), requests, len(requests), shape, calls)
        self.body = ChatReply(self._plan, tokenizer).whole(self._pieces, self._version)
        self.messages: list[dict[str, Any]] = [each["message"] for each in self.body["choices"]]
        """What the client receives, one message per choice."""
        several = [f"{self.id}/{choice}" for choice in range(len(requests))]
        self.completion_ids: list[str] = several if len(requests) > 1 else [self.id]
        """The names by which an agent gives a reward to a choice. Several choices have the same ``id``."""

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        writer = ChatReply(self._plan, self._tokenizer)
        for place, piece in enumerate(self._pieces):
            for chunk in writer.chunks(place, piece, self._version):
                yield chunk
        if self._plan.shape.include_usage:
            yield writer.last_chunk(sum(len(piece.tokens) for piece in self._pieces), self._version)
