"""``POST /v1/chat/completions``: reading the body, rendering the messages and formatting the reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.chat.parsers import PARSERS, ToolCallParser
from headwater.chat.render import (
    RESERVED_ARGUMENTS,
    ChatError,
    Message,
    encode_rendered,
    opens_reasoning,
    read_messages,
    render_chat,
)
from headwater.core.errors import DataError
from headwater.core.media import Media, MediaContent
from headwater.core.protocols import Tokenizer
from headwater.core.requests import MAX_TOP_LOGPROBS
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, checked_text
from headwater.serving.media import encode_media, is_media, take_media
from headwater.serving.openai.plan import (
    CallPlan,
    CallReading,
    SamplingFields,
    Shape,
    check_model,
    fingerprint,
    head,
    read_shape,
    refuse_unsupported,
    usage,
)
from headwater.serving.openai.tools import ToolMessage, ToolUse, for_template
from headwater.serving.options import ServerOptions
from headwater.serving.output import OutputPiece, token_bytes, token_text
from headwater.serving.prompt import ModelLimits

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"

_ONLY_TEXT = "the reply is text"


@dataclass(frozen=True)
class ChatBody:
    """The fields of a chat request. Nothing is rendered yet."""

    model: str
    messages: list[Message]
    """As chat templates expect them: content is text, or a list of parts if the message has images or videos, and the
    arguments of tool calls are objects."""
    contents: list[MediaContent]
    """The images and videos of the messages, in order."""
    template_args: Mapping[str, Any]
    tools: ToolUse
    sampling: SamplingFields
    max_tokens: tuple[str, int | None]
    """The name of the field, and the longest reply."""
    num_top_logprobs: int
    shape: Shape

    @classmethod
    def read(cls, body: Mapping[str, Any], limits: ModelLimits, options: ServerOptions) -> ChatBody:
        fields = Fields(body)
        model = check_model(fields, options)
        sampling = SamplingFields.read(fields, limits)
        max_tokens = _max_tokens(fields)
        logprobs, num_top = _logprobs(fields)
        shape = read_shape(fields, sampling.stops, logprobs=logprobs)
        messages, contents = _messages(fields.raw("messages"), limits)
        template_args, tools = _template_args(fields), ToolUse.read(fields)
        _refuse_unsupported_chat(fields)
        fields.done()
        return cls(model, messages, contents, template_args, tools, sampling, max_tokens, num_top, shape)


def read_chat(
    body: Mapping[str, Any], limits: ModelLimits, options: ServerOptions, parser: ToolCallParser | None = None
) -> CallPlan:
    """``parser`` finds tool calls; without one, requests with tools are refused."""
    chat = ChatBody.read(body, limits, options)
    limits.check_count(chat.sampling.num_samples, "n")
    text = render_messages(chat.messages, chat.template_args, chat.tools, limits)
    tokens, media = _tokens(text, chat.contents, limits)
    field, max_tokens = chat.max_tokens
    num_new = limits.num_new_tokens(len(tokens), max_tokens, None, field, prompt_field="messages")
    sampling, shape, calls = chat.sampling, chat.shape, None
    if chat.tools.schemas:
        if parser is None:
            raise _no_parser()
        calls = CallReading(parser, chat.tools.schemas, chat.tools.is_parallel, opens_reasoning(text))
        grammar = chat.tools.grammar(parser, limits.tokenizer, sampling.grammar, in_reasoning=calls.in_reasoning)
        sampling = replace(sampling, grammar=grammar)
        # Many formats mark calls with special tokens. The parser leaves the others out.
        shape = replace(shape, rules=replace(shape.rules, skip_special_tokens=False))
    params = sampling.params(num_new, num_top_logprobs=chat.num_top_logprobs)
    return CallPlan.build(
        "chatcmpl",
        chat.model,
        [(tokens, params)],
        num_samples=sampling.num_samples,
        seed=sampling.seed,
        shape=shape,
        session=sampling.session,
        calls=calls,
        media=media,
    )


def read_messages_as_tokens(fields: Fields, limits: ModelLimits) -> tuple[int, ...]:
    """The rendered chat of a body that contains nothing but ``messages``, tools and arguments of the template."""
    messages, contents = _messages(fields.raw("messages"), limits)
    text = render_messages(messages, _template_args(fields), ToolUse.read(fields), limits)
    return _tokens(text, contents, limits)[0]


def _no_parser() -> ApiError:
    return ApiError(
        "tools: the chat template does not show how this model writes tool calls; start the server with --tool-parser "
        f"and one of {', '.join(PARSERS.names())}",
        param="tools",
        code="unsupported",
    )


def _max_tokens(fields: Fields) -> tuple[str, int | None]:
    """``max_tokens`` is the older name. If both are given, they must be equal."""
    newer = fields.optional_integer("max_completion_tokens", minimum=1)
    older = fields.optional_integer("max_tokens", minimum=1)
    if newer is not None and older is not None and newer != older:
        raise wrong("max_tokens", older, f"max_completion_tokens is {newer}; give only one of the two")
    if newer is not None:
        return "max_completion_tokens", newer
    return "max_tokens", older


def _logprobs(fields: Fields) -> tuple[bool, int]:
    """Whether log-probs are requested, and how many alternatives."""
    wanted = fields.flag("logprobs", False)
    count = fields.integer("top_logprobs", 0, minimum=0, maximum=MAX_TOP_LOGPROBS)
    if count and not wanted:
        raise wrong("top_logprobs", count, "needs logprobs = true; set it, or remove top_logprobs")
    return wanted, count


def _messages(value: Any, limits: ModelLimits) -> tuple[list[Message], list[MediaContent]]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "must be a list of at least one message")
    limits.check_messages(value, "messages")
    try:
        messages = read_messages({"messages": value}, "messages", "", "request")
    except DataError as error:
        raise ApiError(str(error).removeprefix("request: "), param="messages") from error
    messages, contents = take_media(messages, limits, "messages")
    takes_media = limits.processor is not None
    shown = [
        for_template({**message, "content": _content_of(message["content"], f"{name}.content", takes_media)}, name)
        for name, message in ((f"messages[{place}]", message) for place, message in enumerate(messages))
    ]
    return shown, contents


def _content_of(content: Any, name: str, takes_media: bool) -> str | list[dict[str, Any]] | None:
    """Content as one text, because templates of text models may print a list of parts as a list; as parts if some of
    them are images or videos."""
    if content is None:
        return None
    if isinstance(content, str):
        return checked_text(content, name)
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        if takes_media and is_media(part):
            parts.append(part)
        elif part["type"] == "text":
            parts.append({"type": "text", "text": checked_text(part.get("text"), f"{name}[{place}].text")})
        else:
            what = "text, images and videos" if takes_media else "only text, because its model or engine reads no other"
            rule = f"this server accepts {what}; use parts of type text"
            raise wrong(f"{name}[{place}].type", part["type"], rule)
    return parts if any(map(is_media, parts)) else "".join(part["text"] for part in parts)


def _template_args(fields: Fields) -> dict[str, Any]:
    arguments = dict(fields.mapping("chat_template_kwargs") or {})
    for fixed in RESERVED_ARGUMENTS:
        if fixed in arguments:
            raise ApiError(
                f"chat_template_kwargs.{fixed}: cannot be set; remove it",
                param="chat_template_kwargs",
            )
    arguments.setdefault("add_generation_prompt", fields.flag("add_generation_prompt", True))
    if fields.flag("continue_final_message", False):
        # The template must not begin a new message after the one that is to be continued.
        arguments.update(continue_final_message=True, add_generation_prompt=False)
    return arguments


def render_messages(
    messages: Sequence[Message], arguments: Mapping[str, Any], tools: ToolUse, limits: ModelLimits
) -> str:
    """The text of a chat, with its tools."""
    shown = {"tools": list(tools.schemas)} if tools.schemas else {}
    try:
        owner = limits.tokenizer if limits.processor is None else limits.processor.template
        text = render_chat(owner, messages, {**arguments, **shown})
    except ChatError as error:
        if not error.has_template:
            raise ApiError(
                "the model has no chat template; use /v1/completions, or serve an instruct model", param="messages"
            ) from error
        raise ApiError(f"messages: the chat template refuses them: {error.__cause__}", param="messages") from error
    return limits.short_text(text, "messages")


def _tokens(text: str, contents: Sequence[MediaContent], limits: ModelLimits) -> tuple[tuple[int, ...], Media]:
    if contents:
        tokens, media = encode_media(text, contents, limits, "messages")
    else:
        tokens, media = encode_rendered(limits.tokenizer, text), ()
    if not tokens:
        raise ApiError("messages: the chat template renders them to an empty prompt", param="messages")
    return tokens, media


def _refuse_unsupported_chat(fields: Fields) -> None:
    fields.neutral("modalities", [["text"]], _ONLY_TEXT)
    fields.neutral("audio", [], _ONLY_TEXT)
    fields.neutral("prediction", [], "speculative decoding is not available")
    fields.neutral("web_search_options", [], "web search is not available")
    fields.neutral("reasoning_effort", [], "use chat_template_kwargs to pass arguments to the template")
    fields.neutral("verbosity", ["medium"], "request it in the messages")
    fields.neutral("store", [False], "replies are not stored")
    fields.neutral("service_tier", ["auto", "default"], "all requests have the same priority")
    fields.ignored("safety_identifier")
    refuse_unsupported(fields)


class ChatReply:
    """Formats the pieces of a plan as OpenAI does, complete or in chunks."""

    def __init__(self, plan: CallPlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._messages: dict[int, ToolMessage] = {}

    def whole(self, pieces: Sequence[OutputPiece], version: int) -> dict[str, Any]:
        reply: dict[str, Any] = {
            **head(self._plan, KIND),
            "system_fingerprint": fingerprint(version),
            "choices": [self._whole_choice(place, piece) for place, piece in enumerate(pieces)],
            "usage": usage(self._plan, sum(len(piece.tokens) for piece in pieces)),
        }
        if self._plan.shape.token_ids:
            reply["prompt_token_ids"] = self._plan.requests[0].input_tokens
        return reply

    def chunks(self, place: int, piece: OutputPiece, version: int) -> list[dict[str, Any]]:
        """First the role, then text, then a separate chunk with the finish reason, as OpenAI does."""
        shape = self._plan.shape
        chunks = []
        if place not in self._begun:
            chunk = self._chunk([self._delta(place, {"role": "assistant", "content": ""}, None, None)], version)
            if shape.token_ids and not self._begun:
                chunk["prompt_token_ids"] = self._plan.requests[0].input_tokens
            self._begun.add(place)
            chunks.append(chunk)
        deltas = self._deltas(place, piece)
        if not deltas and piece.tokens and (shape.logprobs or shape.token_ids):
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):
            # The tokens belong to all deltas of the piece together. They are sent once.
            chunks.append(self._chunk([self._delta(place, delta, piece if number == 0 else None, None)], version))
        if piece.stop_reason is not None:
            chunks.append(self._chunk([self._delta(place, {}, None, self._ending(place, piece))], version))
        return chunks

    def last_chunk(self, num_completion_tokens: int, version: int) -> dict[str, Any]:
        return {**self._chunk([], version), "usage": usage(self._plan, num_completion_tokens)}

    def _deltas(self, place: int, piece: OutputPiece) -> list[dict[str, Any]]:
        if self._plan.calls is None:
            return [{"content": piece.text}] if piece.text else []
        return self._message(place, self._plan.calls).take(piece.text, is_last=piece.stop_reason is not None)

    def _message(self, place: int, calls: CallReading) -> ToolMessage:
        if place not in self._messages:
            stream = calls.parser.stream(
                calls.schemas, salt=f"{self._plan.name}-{place}", in_reasoning=calls.in_reasoning
            )
            self._messages[place] = ToolMessage(stream, is_parallel=calls.is_parallel)
        return self._messages[place]

    def _ending(self, place: int, piece: OutputPiece) -> str | None:
        has_calls = place in self._messages and self._messages[place].has_calls
        return "tool_calls" if has_calls and piece.stop_reason == "stop" else piece.stop_reason

    def _chunk(self, choices: list[dict[str, Any]], version: int) -> dict[str, Any]:
        chunk = {**head(self._plan, CHUNK_KIND), "system_fingerprint": fingerprint(version), "choices": choices}
        if self._plan.shape.include_usage:
            chunk["usage"] = None
        return chunk

    def _whole_choice(self, place: int, piece: OutputPiece) -> dict[str, Any]:
        shape = self._plan.shape
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if self._plan.calls is not None:
            self._deltas(place, piece)
            message = self._message(place, self._plan.calls).whole()
        choice: dict[str, Any] = {
            "index": place,
            "message": message,
            "logprobs": self._logprobs(piece) if shape.logprobs else None,
            "finish_reason": self._ending(place, piece),
        }
        if shape.token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _delta(
        self, place: int, delta: dict[str, Any], piece: OutputPiece | None, ending: str | None
    ) -> dict[str, Any]:
        shape = self._plan.shape
        choice: dict[str, Any] = {"index": place, "delta": delta, "logprobs": None, "finish_reason": ending}
        if piece is not None and shape.logprobs:
            choice["logprobs"] = self._logprobs(piece)
        if piece is not None and shape.token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _logprobs(self, piece: OutputPiece) -> dict[str, Any]:
        tops = piece.top_logprobs or ((),) * len(piece.tokens)
        content = [
            {**self._entry(token, logprob), "top_logprobs": [self._entry(*each) for each in top]}
            for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = token_text(self._tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": token_bytes(text)}
