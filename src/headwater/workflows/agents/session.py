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
from headwater.core.protocols import delta_listener
from headwater.core.requests import Delta, Grammar, ModelRequest, ModelResponse, SamplingParams
from headwater.data.media import MediaSettings
from headwater.serving.errors import ApiError
from headwater.serving.openai.chat import ChatReply
from headwater.serving.openai.plan import CallPlan, CallReading
from headwater.serving.output import PieceMaker, whole
from headwater.serving.prompt import MAX_CHARACTERS_PER_TOKEN
from headwater.workflows.agents.calls import ChatCall
from headwater.workflows.agents.conversation import text_of
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
    client_grammar: Literal["follow", "ignore", "refuse"]
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
        self.stored: dict[str, list[Mapping[str, Any]]] = {}
        """The conversations up to each reply of ``/v1/responses``, for calls that name the reply before them."""
        self._episode = episode
        self._rules = rules
        self._num_running = 0
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def sampling(self) -> SamplingParams:
        return self._episode.context.sampling

    @property
    def media(self) -> MediaSettings | None:
        """How images and videos of calls are read; None if the model takes only text."""
        context = self._episode.context
        return None if context.processor is None else context.media_settings

    @contextmanager
    def counting(self, *, is_answer: bool = True) -> Iterator[None]:
        """Count how a call ends. Without ``is_answer`` only errors are counted, while the call is read."""
        try:
            yield
        except ApiError as error:
            self.counts[error.code or "bad_request"] += 1
            raise
        except RolloutFailed:
            self.counts["engine_failed"] += 1
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.counts["disconnected"] += 1
            raise
        if is_answer:
            self.counts["answered"] += 1

    async def answer(self, call: ChatCall) -> dict[str, Any]:
        """The model's reply to a call. It becomes part of the transcript when it is complete."""
        with self.counting(), self._drafts(call) as (drafts, writer):
            await self._until_closed(_all(self._generate(draft, call, writer.grammar) for draft in drafts))
            return self._commit(drafts, writer)

    async def stream(self, call: ChatCall) -> AsyncGenerator[dict[str, Any], None]:
        """The reply in chunks, as the model writes it. The last chunks follow when the reply is in the transcript."""
        arrived: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()

        async def generate(place: int, draft: Draft) -> None:
            delta_listener.set(lambda delta: arrived.put_nowait((place, delta)))
            await self._generate(draft, call, writer.grammar)

        with self.counting(), self._drafts(call) as (drafts, writer):
            work = asyncio.ensure_future(
                self._until_closed(_all(generate(place, draft) for place, draft in enumerate(drafts)))
            )
            work.add_done_callback(lambda _: arrived.put_nowait(None))
            last: dict[int, Delta] = {}
            try:
                while (item := await arrived.get()) is not None:
                    place, delta = item
                    if delta.stop_reason is not None:
                        last[place] = delta
                        continue
                    for chunk in writer.chunks(place, delta):
                        yield chunk
                await work
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            self._commit(drafts, writer)
        for place, draft in enumerate(drafts):
            assert draft.piece.response is not None
            for chunk in writer.chunks(place, last.get(place) or Delta.of(draft.piece.response)):
                yield chunk
        if call.shape.include_usage:
            yield writer.usage_chunk()

    @contextmanager
    def _drafts(self, call: ChatCall) -> Iterator[tuple[list[Draft], ReplyWriter]]:
        """One draft per choice of a call. Those that are not committed in this block leave no trace."""
        if self._is_closed:  # while the body was read
            raise episode_ended()
        self._check(call)
        if self._rules.client_grammar == "ignore":
            call = call.unconstrained()
        parser = self._parser() if call.tools.schemas else None
        drafts: list[Draft] = []
        self._num_running += call.num_choices
        try:
            for _ in range(call.num_choices):
                drafts.append(self._open(call))  # noqa: PERF401  those that are open are closed if one fails
            yield drafts, ReplyWriter(call, [draft.piece for draft in drafts], parser)
        finally:
            self._num_running -= call.num_choices
            for draft in drafts:
                draft.close()

    def _commit(self, drafts: Sequence[Draft], writer: ReplyWriter) -> dict[str, Any]:
        body = writer.whole([draft.piece.response for draft in drafts if draft.piece.response is not None])
        for draft, name, choice in zip(drafts, writer.completion_ids, body["choices"], strict=True):
            draft.commit(name, choice["message"])
        return body

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
        if call.constraint:
            self._check_constraint(call.constraint)
        if self.transcript.num_replies + self._num_running + call.num_choices > self._rules.max_turns:
            self.limit = "turns"
            raise ApiError(
                f"the episode has reached rollout.workflow_args.max_turns = {self._rules.max_turns} replies; "
                "end it, or raise max_turns",
                code="max_turns_exceeded",
            )

    def _check_constraint(self, constraint: str) -> None:
        if self._rules.client_grammar == "refuse":
            raise ApiError(
                f"{constraint}: replies that are trained on are sampled from the model's own distribution; remove it, "
                "or set rollout.workflow_args.client_grammar to follow or ignore",
                code="grammar_refused",
            )
        if constraint not in self._rules.noted and len(self._rules.noted) < _MOST_NOTES:
            self._rules.noted.add(constraint)
            ignores = self._rules.client_grammar == "ignore"
            effect = "it has no effect" if ignores else "such replies follow a grammar and are not trained"
            log.warning("the agent asked for %s: %s (client_grammar)", constraint, effect)

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
        num_characters = sum(len(text_of(message["content"])) for message in call.messages)
        if num_characters > MAX_CHARACTERS_PER_TOKEN * num_tokens:
            raise NoRoom(
                f"the messages have {num_characters} characters, and an episode {num_tokens} tokens; shorten them"
            )

    async def _generate(self, draft: Draft, call: ChatCall, grammar: Grammar | None) -> None:
        try:
            await draft.piece.reply(call.max_tokens, call.shape.rules.stops, grammar=grammar)
        except RequestError as error:  # longer than the engine's cache, or a grammar that it cannot follow
            if grammar is not None:
                raise ApiError(str(error), param=call.constraint, code="unsupported") from error
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


class ReplyWriter:
    """Formats the reply to a call. ``pieces`` are those that the model will continue, one per choice."""

    def __init__(self, call: ChatCall, pieces: Sequence[Episode], parser: ToolCallParser | None) -> None:
        first = pieces[0]
        self._tokenizer = tokenizer = first.context.tokenizer
        # The same in every run, because some chat templates show the ids of tool calls, which begin with it.
        name = f"{first.data.rng_key} {first.name} {first.num_turns + 1}"
        self.id = f"chatcmpl-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
        self.grammar: Grammar | None = call.answer
        """What the reply must match; None if the model may write anything."""
        calls, shape = None, call.shape
        if parser is not None and call.tools.schemas:
            in_reasoning = first.will_begin_in_reasoning
            calls = CallReading(parser, call.tools.schemas, call.tools.is_parallel, in_reasoning)
            self.grammar = call.tools.grammar(parser, tokenizer, call.answer, in_reasoning=in_reasoning)
            # Many formats mark calls with special tokens. The parser leaves the others out.
            shape = replace(shape, rules=replace(shape.rules, skip_special_tokens=False))
        request = ModelRequest(self.id, first.tokens, SamplingParams(max_new_tokens=1), rng_key=0)
        requests = (request,) * len(pieces)
        self._plan = CallPlan(self.id, call.model, int(time.time()), requests, len(requests), shape, calls)
        self._makers = [PieceMaker(tokenizer, shape.rules) for _ in pieces]
        self._chunks = ChatReply(self._plan, tokenizer)
        self._version = self._num_tokens = 0
        several = [f"{self.id}/{choice}" for choice in range(len(requests))]
        self.completion_ids: list[str] = several if len(requests) > 1 else [self.id]
        """The names by which an agent gives a reward to a choice. Several choices have the same ``id``."""

    def whole(self, responses: Sequence[ModelResponse]) -> dict[str, Any]:
        pieces = [whole(each, self._tokenizer, self._plan.shape.rules) for each in responses]
        version = max((version for piece in pieces for version in piece.versions), default=0)
        return ChatReply(self._plan, self._tokenizer).whole(pieces, version)

    def chunks(self, place: int, delta: Delta) -> list[dict[str, Any]]:
        self._version = max(self._version, *delta.versions, 0)
        self._num_tokens += len(delta.tokens)
        piece = self._makers[place].piece(delta.tokens, delta.logprobs, delta.versions, delta.stop_reason)
        return self._chunks.chunks(place, piece, self._version)

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunks.last_chunk(self._num_tokens, self._version)
