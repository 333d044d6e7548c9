"""Reading a chat call of an agent.

Every reply is sampled with the run's own settings, because the learner computes log-probs under them. What a client
asks for is therefore treated in one of these ways:

- ``max_tokens``, ``stop``, ``n``, ``tools``, ``stream`` and ``logprobs`` work as usual.
- ``temperature``, ``top_p`` and other settings of the same kind are replaced by the run's, and the log says so once.
  With ``client_sampling: refuse`` a different value is an error.
- ``response_format`` and a ``tool_choice`` that requires a call are followed with a grammar, and the reply is not
  trained. With ``client_grammar: ignore`` they have no effect, and with ``refuse`` they are an error.
- What would change the distribution in another way, such as a penalty, is always an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.chat.render import RESERVED_ARGUMENTS, read_messages
from headwater.core.errors import DataError
from headwater.core.media import MediaContent
from headwater.core.requests import Grammar, SamplingParams
from headwater.data.media import MediaSettings
from headwater.data.message_media import has_media, load_message_media
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, checked_text
from headwater.serving.media import MAX_ITEMS, is_media, pixels_of_request
from headwater.serving.openai.plan import Shape, read_shape
from headwater.serving.openai.tools import ToolUse, for_template
from headwater.serving.sampling import read_response_format, read_stops
from headwater.workflows.agents.conversation import text_of

_UNTRAINABLE = (
    "replies that are trained on are sampled from the model's own distribution; remove it, and let the reward tell "
    "the model what to write"
)
_LABELS = (
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
"""Fields that do not change what the model writes."""
_MAX_CHOICES = 64


@dataclass(frozen=True)
class ChatCall:
    """One call of ``/v1/chat/completions``."""

    model: str
    messages: tuple[dict[str, Any], ...]
    """With text as content, or parts with loaded images and videos, and arguments of tool calls as mappings: what an
    episode expects."""
    template_args: Mapping[str, Any]
    """Arguments that the call brings for the chat template: its tools and ``chat_template_kwargs``."""
    tools: ToolUse
    num_choices: int
    max_tokens: int | None
    shape: Shape
    answer: Grammar | None
    """``response_format``: what a reply without tool calls must match."""
    replaced: tuple[str, ...]
    """Settings of the client that the run's own ones replace, for example ``temperature = 0.2``."""

    @property
    def constraint(self) -> str:
        """What the reply must match, in words; empty if the model may write anything."""
        if self.tools.choice == "required":
            return f"tool_choice = {self.tools.name or 'required'}"
        return "response_format" if self.answer is not None else ""

    def unconstrained(self) -> ChatCall:
        """The same call, whose reply may be anything."""
        return replace(self, answer=None, tools=replace(self.tools, choice="auto", name=""))


def read_call(body: Mapping[str, Any], sampling: SamplingParams, media: MediaSettings | None = None) -> ChatCall:
    """``media`` says how images and videos are read; None if the model takes only text."""
    fields = Fields(body)
    model = fields.text("model") or "default"
    stops = read_stops(fields)
    max_tokens = _max_tokens(fields)
    logprobs = fields.flag("logprobs", False)
    fields.neutral("top_logprobs", [0], "alternatives are not available in an episode; remove it")
    tools = ToolUse.read(fields)
    shown = {"tools": list(tools.schemas)} if tools.schemas else {}
    call = ChatCall(
        model=model,
        messages=_messages(fields.raw("messages"), media),
        template_args={**_template_args(fields), **shown},
        tools=tools,
        num_choices=fields.integer("n", 1, minimum=1, maximum=_MAX_CHOICES),
        max_tokens=max_tokens,
        shape=read_shape(fields, stops, logprobs=logprobs),
        answer=read_response_format(fields),
        replaced=tuple(_replaced(fields, sampling)),
    )
    _refuse_untrainable(fields)
    fields.ignored(*_LABELS)
    return replace(call, replaced=(*call.replaced, *fields.unread()))


def _max_tokens(fields: Fields) -> int | None:
    newer = fields.optional_integer("max_completion_tokens", minimum=1)
    older = fields.optional_integer("max_tokens", minimum=1)
    return older if newer is None else newer


def _messages(value: Any, media: MediaSettings | None) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "must be a list of at least one message")
    try:
        messages = read_messages({"messages": value}, "messages", "", "request")
    except DataError as error:
        raise ApiError(str(error).removeprefix("request: "), param="messages") from error
    loaded: Sequence[Mapping[str, Any]] = messages
    if media is not None and has_media(messages):
        _check_count(messages)
        try:
            limited = replace(media, check=pixels_of_request())
            loaded = load_message_media(messages, "messages", settings=limited, may_read_files=False)
        except DataError as error:
            raise ApiError(str(error), param="messages", code="bad_media") from error
    return tuple(_message(each, f"messages[{place}]") for place, each in enumerate(loaded))


def _check_count(messages: Sequence[Mapping[str, Any]]) -> None:
    contents = [message["content"] for message in messages]
    count = sum(is_media(part) for content in contents if isinstance(content, list) for part in content)
    if count > MAX_ITEMS:
        raise ApiError(
            f"messages: {count} images and videos, and the limit is {MAX_ITEMS}; send fewer", param="messages"
        )


def _is_loaded(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get(part["type"]), MediaContent)


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    content = message["content"]
    parts = content if isinstance(content, list) else []
    for place, part in enumerate(parts):
        if part["type"] != "text" and not _is_loaded(part):
            raise wrong(
                f"{name}.content[{place}].type",
                part["type"],
                "the model of this episode takes no such parts; send text",
            )
    text = checked_text(text_of(content), f"{name}.content")
    made = {"role": message["role"], "content": parts if any(map(_is_loaded, parts)) else text}
    made |= {key: message[key] for key in ("name", "tool_call_id", "tool_calls") if key in message}
    return for_template(made, name)


def _template_args(fields: Fields) -> dict[str, Any]:
    arguments = dict(fields.mapping("chat_template_kwargs") or {})
    for fixed in (*RESERVED_ARGUMENTS, "add_generation_prompt", "continue_final_message", "tools"):
        if fixed in arguments:
            raise ApiError(f"chat_template_kwargs.{fixed}: cannot be set; remove it", param="chat_template_kwargs")
    return arguments


def _replaced(fields: Fields, sampling: SamplingParams) -> list[str]:
    own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
    replaced = []
    for name, value in own.items():
        if (given := fields.number(name, value)) != value:
            replaced.append(f"{name} = {given:g}")
    if (top_k := max(0, fields.integer("top_k", sampling.top_k))) != sampling.top_k:
        replaced.append(f"top_k = {top_k}")
    others = {name: fields.raw(name) for name in ("seed", "reasoning_effort", "verbosity", "min_tokens")}
    return [*replaced, *(f"{name} = {given!r}" for name, given in others.items() if given is not None)]


def _refuse_untrainable(fields: Fields) -> None:
    fields.neutral("logit_bias", [{}], _UNTRAINABLE)
    fields.neutral("presence_penalty", [0], _UNTRAINABLE)
    fields.neutral("frequency_penalty", [0], _UNTRAINABLE)
    fields.neutral("repetition_penalty", [1], _UNTRAINABLE)
    fields.neutral("ignore_eos", [False], _UNTRAINABLE)
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex"):
        fields.neutral(name, [], _UNTRAINABLE)
    fields.neutral("modalities", [["text"]], "the reply is text")
    fields.neutral("audio", [], "the reply is text")
