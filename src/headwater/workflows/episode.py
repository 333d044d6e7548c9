"""``Episode``: what a workflow works with.

    async def run(self, episode):
        for _ in range(self._max_turns):
            text = await episode.reply()
            if is_done(text) or not episode.tell([{"role": "user", "content": "Try again."}]):
                break
        return episode.finish(await episode.score())

An episode records every token that the model reads and writes, in order. Tokens are only ever appended, so the model's
next request reads exactly the tokens that the learner trains on later. The episode also keeps loss masks, log-probs,
policy versions and randomness keys, and limits the length to ``rollout.max_new_tokens``. Images and videos of the
prompt, and of messages that the workflow adds, are among the tokens, which are never trained and use up room.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater.chat.next_turn import next_turn
from headwater.chat.render import (
    MODEL_TURN,
    ChatError,
    encode_rendered,
    is_model_turn,
    kinds_of_parts,
    opens_reasoning,
    render_chat,
    text_decoder,
)
from headwater.core.errors import DataError, RolloutFailed
from headwater.core.media import Media, MediaContent, MediaProcessor
from headwater.core.protocols import EpisodeEngine, EpisodeInput, EpisodeStage, Tokenizer
from headwater.core.records import NOT_SAMPLED, Prompt, RewardManager, Score, Trajectory
from headwater.core.requests import Grammar, ModelRequest, ModelResponse, SamplingParams, StopReason, derive_key
from headwater.data.media import MediaSettings
from headwater.data.message_media import has_media, load_message_media, take_message_media, with_digests

if TYPE_CHECKING:
    from headwater.chat.parsers import ToolCallParser
    from headwater.tools.toolbox import Toolbox

Message = Mapping[str, Any]
EpisodeResult = Trajectory | list[Trajectory] | None
"""One trajectory, several pieces of the same episode, or None if the workflow rejects the episode."""

_KEY_MASK = 2**64 - 1
_NUM_OPENING_TOKENS = 16
"""How many tokens before a reply are decoded to see whether they begin reasoning."""


@dataclass(frozen=True)
class WorkflowContext:
    """What every workflow is constructed with."""

    tokenizer: Tokenizer
    reward: RewardManager
    sampling: SamplingParams
    """``max_new_tokens`` limits everything after the prompt: all replies and the messages between them."""
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    """``data.chat_template_args``: arguments for the chat template, the same as for prompts."""
    max_prompt_tokens: int = 0
    """``data.max_prompt_tokens``: how long the prompt of a branch with new messages may be without using up room. 0
    means as long as the episode's own prompt."""
    tools: Toolbox | None = None
    """The tools of the run; None if it has none."""
    parser: ToolCallParser | None = None
    """Finds tool calls in the model's messages; None if the run has no tools."""
    processor: MediaProcessor | None = None
    """Makes tokens of images and videos; None if the model takes only text."""
    media_settings: MediaSettings = field(default_factory=MediaSettings)
    """How images and videos are read, for example how large they may be."""

    @cached_property
    def text_of(self) -> Callable[[Sequence[int]], str]:
        """From tokens to their text without special tokens."""
        return text_decoder(self.tokenizer)


class _Turn(NamedTuple):
    """Where a reply is in its episode, for branches that start after it."""

    chat_length: int
    """Messages up to and including the reply."""
    start: int
    end: int
    """The reply's tokens are those from ``start`` up to ``end``, which is not included."""
    text: str
    stop_reason: StopReason


class Episode:
    """One conversation with the model, from a prompt to a scored trajectory."""

    def __init__(self, context: WorkflowContext, engine: EpisodeEngine, data: EpisodeInput) -> None:
        self.context = context
        self.engine = engine
        self.data = data
        prompt = data.prompt
        self._name = name = f"{prompt.uid}#{data.sample}"
        self.session = f"{name}@{data.rng_key & _KEY_MASK:x}"
        """Names the episode to a router. All its pieces share it, because they share a prefix."""
        self._num_requests = 0
        self._num_branches = 0
        # Some templates write the tools anew in every turn, so each rendering needs them.
        self._template_args = context.chat_template_args
        if prompt.tool_schemas:
            self._template_args = {**self._template_args, "tools": list(prompt.tool_schemas)}
        media = prompt.media
        messages = with_digests(prompt.messages, media) if media else prompt.messages
        self._start(messages, prompt.tokens, media)

    def _start(self, messages: Sequence[Message], tokens: Sequence[int], media: Media) -> None:
        self.response: ModelResponse | None = None
        """The engine's last response."""
        self.stop_reason: StopReason = "stop"
        """Why the last reply ended; ``length`` after ``tell`` found no room."""
        self._chat: list[Message] = list(messages)
        self._replies: list[Message] = []
        self._turns: list[_Turn] = []
        self._text = ""
        self._prompt_length = self._turn_start = self._turn_end = len(tokens)
        # Tuples, so that the samples of a prompt share its tokens, and a request or a trajectory needs no copy.
        self._tokens: tuple[int, ...] = ()
        self._loss_mask: tuple[int, ...] = ()
        self._logprobs: tuple[float, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._media: Media = ()
        self._append_given(tokens, media)

    @property
    def prompt(self) -> Prompt:
        return self.data.prompt

    @property
    def name(self) -> str:
        """Names this piece in messages and request ids."""
        return self._name

    @property
    def sample(self) -> int:
        """Number of this episode within its group."""
        return self.data.sample

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far: the input of the next request."""
        return self._tokens

    @property
    def media(self) -> Media:
        """Images and videos so far, and the tokens that stand for them."""
        return self._media

    @property
    def room(self) -> int:
        """Tokens that still fit, for replies and messages together.

        The prompt of a branch with new messages may be longer than the episode's prompt and than
        ``data.max_prompt_tokens``; the excess uses up room.
        """
        context, num_given = self.context, self._prompt_length
        excess = max(0, num_given - max(len(self.data.prompt.tokens), context.max_prompt_tokens))
        return context.sampling.max_new_tokens - excess - (len(self._tokens) - num_given)

    @property
    def num_turns(self) -> int:
        """Messages that the model wrote."""
        return len(self._replies)

    @property
    def text(self) -> str:
        """The model's last message without special tokens; empty before the first reply."""
        return self._text

    @property
    def raw_text(self) -> str:
        """The model's last message with its special tokens, for example the markers of tool calls.

        Only the end token that closes the message is removed.
        """
        tokens = list(self._tokens[self._turn_start : self._turn_end])
        if tokens and tokens[-1] in (self.context.tokenizer.eos_token_id, *self.context.sampling.stop_token_ids):
            tokens = tokens[:-1]
        return self.context.tokenizer.decode(tokens, skip_special_tokens=False)

    @property
    def begins_in_reasoning(self) -> bool:
        """Whether the model's last message begins inside reasoning, because the chat template has written ``<think>``.

        Parsers of tool calls need to know it.
        """
        before = self._tokens[max(0, self._turn_start - _NUM_OPENING_TOKENS) : self._turn_start]
        return opens_reasoning(self.context.tokenizer.decode(list(before), skip_special_tokens=False))

    @property
    def will_begin_in_reasoning(self) -> bool:
        """Whether the model's next message begins inside reasoning."""
        last = self._tokens[-_NUM_OPENING_TOKENS:]
        return opens_reasoning(self.context.tokenizer.decode(list(last), skip_special_tokens=False))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation, including the model's messages.

        A part that is an image or a video has the digest of its content: ``{"type": "image", "digest": ...}``.
        """
        replies = iter(self._replies)
        return tuple([next(replies) if is_model_turn(message) else message for message in self._chat])

    async def reply(
        self,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        *,
        turn: int | None = None,
        grammar: Grammar | None = None,
    ) -> str:
        """Let the model write its next message, and return it as text.

        ``max_tokens`` limits this message in addition to ``room``; ``stop`` adds strings that end it. By default the
        first reply draws from the episode's key and later ones from a key derived from their number. ``turn`` sets
        that number explicitly. Without ``tell`` in between, the model continues its previous message. A reply that must
        match a ``grammar`` is not trained: the learner computes log-probs without it.

        Raises ``RolloutFailed`` if the engine aborts the request: a part of an answer must never be scored.
        """
        room = self.room
        self._check_can_reply(room)
        request = self._request(room if max_tokens is None else min(room, max_tokens), stop, turn, grammar)
        response = await self.engine.agenerate(request)
        if response.stop_reason == "abort":
            raise RolloutFailed(f"request {request.request_id}: the engine aborted it")
        if response.input_tokens != request.input_tokens:
            raise RolloutFailed(
                f"request {request.request_id}: the engine answered for {len(response.input_tokens)} other input "
                f"tokens than the {len(request.input_tokens)} it was sent"
            )
        self._num_requests += 1
        self._append_response(response, is_trained=grammar is None)
        return self._text

    def tell(
        self, messages: Sequence[Message], *, tool_calls: Sequence[Message] = (), content: str | None = None
    ) -> bool:
        """Append messages after the model's reply, in the format of the chat template. They are not trained.

        ``tool_calls`` are the calls that the workflow found in the reply. Some templates require them before a ``tool``
        message. The reply itself does not change: the template's text for the calls is not inserted, because the model
        has already written them. In ``messages`` the reply then has ``tool_calls`` and ``content``, the rest of its
        text, which defaults to all of ``text``. If the template accepts no ``tool`` messages, they become one user
        message.

        A message may have images and videos: its content is then a list of parts, such as ``{"type": "image", "image":
        picture}`` with a Pillow image, bytes or a path, or ``{"type": "image_url", "image_url": {"url": "data:..."}}``.

        Returns False, and appends nothing, if the messages and at least one more token do not fit. The episode's stop
        reason is then ``length``.
        """
        if self.response is None or not is_model_turn(self._chat[-1]):
            raise ValueError(
                f"episode {self._name}: tell() must follow a reply(); pass all messages between two replies in one call"
            )
        messages, contents = self._take_media(messages, "tell() was given")
        parsed = {"tool_calls": list(tool_calls)} if tool_calls else {}
        chat = [*self._chat[:-1], {**parsed, **MODEL_TURN}, *messages]
        written = self.response.output_tokens
        was_stopped = bool(written) and written[-1] in self.context.sampling.stop_token_ids
        has_ended = self.response.stop_reason == "stop" and not was_stopped
        turn = next_turn(
            self.context.tokenizer,
            chat,
            written,
            self._template_args,
            has_ended=has_ended,
            processor=self.context.processor,
            contents=contents,
        )
        if self.room < len(turn.tokens) + max(1, self.context.sampling.min_new_tokens):
            self.stop_reason = "length"
            return False
        self._append_given(turn.tokens, turn.media)
        self._chat = turn.chat
        self._replies[-1] = {"role": "assistant", "content": self.text if content is None else content, **parsed}
        return True

    async def read_media(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with their images and videos loaded, for ``tell`` and ``branch``.

        These load what is not loaded yet, and all episodes wait meanwhile. This method loads in a thread.
        """
        if self.context.processor is None or not has_media(messages):
            return list(messages)
        with self.doing("reading images or videos", "reading_media"):
            return await asyncio.to_thread(self._load_media, messages, "read_media() was given")

    async def score(self) -> Score:
        """Score the episode so far with the run's reward manager."""
        with self.doing("scoring", "scoring"):
            return await self.context.reward.score(self)

    def doing(self, what: str, stage: EpisodeStage = "working") -> AbstractContextManager[object]:
        """State what happens inside this block, for ``headwater doctor``: ``with episode.doing("calling search"):``."""
        return self.data.state.doing(what, stage)

    def finish(
        self, score: Score | float, *, turn_scores: Sequence[float] | None = None, info: Mapping[str, Any] | None = None
    ) -> Trajectory:
        """The trajectory to train on.

        ``turn_scores`` distributes the score over the model's messages and must sum to it; by default the last message
        gets all of it. ``info`` is stored with the rollout, beside the last reply (``response_text``) and the info of
        the score. The trajectory also keeps the whole conversation (``messages``).
        """
        if not isinstance(score, Score):
            score = Score(score)
        data = self.data
        return Trajectory(
            uid=data.prompt.uid,
            sample=data.sample,
            tokens=self._tokens,
            prompt_length=self._prompt_length,
            loss_mask=self._loss_mask,
            logprobs=self._logprobs,
            versions=self._versions,
            reward=score.value,
            stop_reason=self.stop_reason,
            turn_rewards=tuple(turn_scores or ()),
            info={**score.info, "response_text": self._text, **(info or {})},
            messages=self.messages,
            reward_info=score.info,
            media=self._media,
        )

    def branch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        turn: int | None = None,
        template_args: Mapping[str, Any] | None = None,
        label: str | None = None,
    ) -> Episode:
        """Another piece of the same episode, with separate randomness.

        It starts as a copy of this piece, or as a new conversation from ``messages`` (for example a summary that
        replaces a long history). Finish every piece that should be trained and return them as a list; copied replies
        are trained in each piece that holds them. Groups are compared over episodes: all pieces of an episode together
        have the weight of one trajectory.

        ``turn`` copies this piece as it was after that many replies. ``template_args``, with ``messages``, are further
        arguments for the chat template, such as ``tools``. The randomness of a piece depends on its ``label``, which
        must be unique; by default it is the number of branches so far.
        """
        if label is None:
            label, self._num_branches = str(self._num_branches), self._num_branches + 1
        piece = self.copy()
        piece.data = replace(self.data, rng_key=derive_key(self.data.rng_key, "branch", label))
        piece._name = f"{self._name}.{label}"
        piece._num_requests = piece._num_branches = 0
        if messages is not None:
            piece._template_args = {**self._template_args, **(template_args or {})}
            piece._start(*piece._render(messages))
        elif turn is not None:
            piece._cut(turn)
        return piece

    def copy(self) -> Episode:
        """The same piece as a separate object. The next reply of both has the same randomness, so discard one."""
        piece = copy.copy(self)
        piece._chat, piece._replies, piece._turns = list(self._chat), list(self._replies), list(self._turns)
        return piece

    def _cut(self, turn: int) -> None:
        """Remove everything after the reply with this number, counted from 1, or after the prompt."""
        if turn == 0:
            is_first = [is_model_turn(each) for each in self._chat]
            end = is_first.index(True) if True in is_first else len(self._chat)
            self._start(self._chat[:end], self._tokens[: self._prompt_length], self._media_until(self._prompt_length))
            return
        last = self._turns[turn - 1]
        self._chat = self._chat[: last.chat_length]
        self._replies, self._turns = self._replies[:turn], self._turns[:turn]
        self._tokens, self._loss_mask = self._tokens[: last.end], self._loss_mask[: last.end]
        self._logprobs, self._versions = self._logprobs[: last.end], self._versions[: last.end]
        self._media = self._media_until(last.end)
        self._turn_start, self._turn_end, self._text = last.start, last.end, last.text
        start, self.stop_reason = last.start, last.stop_reason
        self.response = ModelResponse(
            input_tokens=self._tokens[:start],
            output_tokens=self._tokens[start:],
            output_logprobs=self._logprobs[start:],
            output_versions=self._versions[start:],
            stop_reason=self.stop_reason,
        )

    def _media_until(self, end: int) -> Media:
        return tuple(item for item in self._media if item.end <= end)

    def _render(self, messages: Sequence[Message]) -> tuple[Sequence[Message], tuple[int, ...], Media]:
        """The messages of a new conversation, with digests instead of images and videos, their tokens and media."""
        messages, contents = self._take_media(messages, "branch() was given")
        tokenizer, processor = self.context.tokenizer, self.context.processor
        try:
            text = render_chat(tokenizer if processor is None else processor.template, messages, self._template_args)
            if processor is not None and contents:
                return messages, *processor.encode(text, contents)
            return messages, encode_rendered(tokenizer, text), ()
        except (ChatError, ValueError) as error:
            raise RolloutFailed(f"episode {self._name}: the chat template refuses the messages ({error})") from error

    def _check_can_reply(self, room: int) -> None:
        if self._media and self.context.processor is None:
            raise RolloutFailed(
                f"row {self.prompt.uid}: has images or videos, but the model takes only text; use a vision model, "
                "remove these columns, or set rollout.workflow to one that uses them itself"
            )
        if not self._media:
            self._check_only_text(self.prompt.messages, "its prompt has")
        if room < 1:
            raise RolloutFailed(
                f"episode {self._name}: no room for another reply; raise rollout.max_new_tokens, or end the episode "
                "when tell() returns False"
            )

    def _take_media(self, messages: Sequence[Message], what: str) -> tuple[list[Message], list[MediaContent]]:
        """The messages with digests instead of images and videos, and these."""
        if self.context.processor is None or not has_media(messages):
            self._check_only_text(messages, what)
            return list(messages), []
        return take_message_media(self._load_media(messages, what))

    def _load_media(self, messages: Sequence[Message], what: str) -> list[Message]:
        items = (*self.prompt.media, *self._media)
        known = {item.content.digest: item.content for item in items}
        try:
            return load_message_media(messages, f"{what} messages", known, settings=self.context.media_settings)
        except DataError as error:
            raise RolloutFailed(f"episode {self._name}: {error}") from error

    def _check_only_text(self, messages: Sequence[Message], what: str) -> None:
        """Chat templates of text models skip other parts silently, so the model would answer without them."""
        if kinds := kinds_of_parts(messages) - {"text"}:
            raise RolloutFailed(
                f"episode {self._name}: {what} message parts of type {', '.join(sorted(kinds))}, which the model does "
                "not take; remove them, or use a model that takes them"
            )

    def _request(self, limit: int, stop: Sequence[str], turn: int | None, grammar: Grammar | None) -> ModelRequest:
        name, key = self._name, self.data.rng_key
        if turn is None and self._num_requests:
            turn = self._num_requests
        if turn is not None:
            name, key = f"{name}/{turn}", derive_key(key, "turn", turn)
        sampling = self.context.sampling
        if limit != sampling.max_new_tokens or stop or grammar is not None or sampling.min_new_tokens > limit:
            sampling = replace(
                sampling,
                max_new_tokens=limit,
                min_new_tokens=min(sampling.min_new_tokens, limit) if grammar is None else 0,
                grammar=sampling.grammar if grammar is None else grammar,
                stop_strings=(*sampling.stop_strings, *stop),
            )
        return ModelRequest(name, self._tokens, sampling, key, session=self.session, media=self._media)

    def _append_response(self, response: ModelResponse, *, is_trained: bool) -> None:
        if not (self._chat and is_model_turn(self._chat[-1])):
            self._turn_start = len(self._tokens)
            self._chat.append(MODEL_TURN)
            self._replies.append({})
        else:
            self._turns.pop()
        self._tokens += tuple(response.output_tokens)
        self._loss_mask += (int(is_trained),) * len(response.output_tokens)
        self._logprobs += tuple(response.output_logprobs)
        self._versions += tuple(response.output_versions)
        self._turn_end = len(self._tokens)
        self._text = self.context.text_of(self._tokens[self._turn_start :])
        self._replies[-1] = {"role": "assistant", "content": self._text}
        self.response, self.stop_reason = response, response.stop_reason
        self._turns.append(_Turn(len(self._chat), self._turn_start, self._turn_end, self._text, self.stop_reason))

    def _append_given(self, tokens: Sequence[int], media: Media) -> None:
        """``media`` have their places among ``tokens``."""
        if media:
            self._media += tuple(item.moved(len(self._tokens)) for item in media)
        self._tokens += tuple(tokens)  # the same object, if nothing was there before
        loss_mask, logprobs, versions = _columns_of_given(len(tokens))
        self._loss_mask += loss_mask
        self._logprobs += logprobs
        self._versions += versions


@lru_cache(maxsize=16)
def _columns_of_given(count: int) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
    """Loss mask, log-probs and versions of tokens that were not sampled. The samples of a prompt share them."""
    return (0,) * count, (0.0,) * count, (NOT_SAMPLED,) * count
