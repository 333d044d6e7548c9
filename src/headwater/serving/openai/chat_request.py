"""``POST /v1/chat/completions``: what a body asks for. The messages go through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError

from headwater.core.errors import DataError
from headwater.data.chat import Message, read_messages
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, checked_text
from headwater.serving.openai.plan import Plan
from headwater.serving.openai.sampling import SamplingFields, check_model, read_shape, refuse_unsupported
from headwater.serving.prompt import ModelLimits

_ONLY_TEXT = "the reply is text"
_NO_TOOLS = "this server returns text and does not look for tool calls in it; describe tools in the messages"
_NO_GRAMMAR = "the model is not held to a format"


def read_chat(body: Mapping[str, Any], limits: ModelLimits, served_name: str) -> Plan:
    fields = Fields(body)
    model = check_model(fields, served_name)
    sampling = SamplingFields.read(fields, limits)
    field, max_tokens = _max_tokens(fields)
    shape = read_shape(fields, sampling.stops, logprobs=_logprobs(fields))
    messages = _messages(fields.raw("messages"))
    template_args = _template_args(fields)
    _refuse_unsupported_chat(fields)
    fields.done()
    limits.check_count(sampling.num_samples, "n")
    tokens = _render(messages, template_args, limits)
    params = sampling.params(limits.num_new_tokens(len(tokens), max_tokens, None, field, prompt_field="messages"))
    return Plan.build(
        "chatcmpl", model, [(tokens, params)], num_samples=sampling.num_samples, seed=sampling.seed, shape=shape
    )


def _max_tokens(fields: Fields) -> tuple[str, int | None]:
    """``max_tokens`` is the older name; given both, they must agree."""
    newer = fields.optional_integer("max_completion_tokens", minimum=1)
    older = fields.optional_integer("max_tokens", minimum=1)
    if newer is not None and older is not None and newer != older:
        raise wrong("max_tokens", older, f"max_completion_tokens is {newer}; give only one of the two")
    if newer is not None:
        return "max_completion_tokens", newer
    return "max_tokens", older


def _logprobs(fields: Fields) -> bool:
    wanted = fields.flag("logprobs", False)
    count = fields.integer("top_logprobs", 0, minimum=0)
    if count > 0:
        raise wrong("top_logprobs", count, "only the sampled token's log-prob is known, not its alternatives'; use 0")
    return wanted


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "must be a list of at least one message")
    try:
        messages = read_messages({"messages": value}, "messages", "", "request")
    except DataError as error:
        raise ApiError(str(error).removeprefix("request: "), param="messages") from error
    return [
        {**message, "content": _text_of(message["content"], f"messages[{place}].content")}
        for place, message in enumerate(messages)
    ]


def _text_of(content: Any, name: str) -> str | None:
    """Content as one text: templates of text models may print a list of parts as a list."""
    if content is None:
        return None
    if isinstance(content, str):
        return checked_text(content, name)
    texts = []
    for place, part in enumerate(content):
        if part["type"] != "text":
            raise wrong(f"{name}[{place}].type", part["type"], "this server takes only text; use parts of type text")
        texts.append(checked_text(part.get("text"), f"{name}[{place}].text"))
    return "".join(texts)


def _template_args(fields: Fields) -> dict[str, Any]:
    arguments = dict(fields.mapping("chat_template_kwargs") or {})
    for fixed in ("tokenize", "return_dict", "return_tensors", "conversation", "chat_template"):
        if fixed in arguments:
            raise ApiError(
                f"chat_template_kwargs.{fixed}: is not the template's to choose; leave it out",
                param="chat_template_kwargs",
            )
    arguments.setdefault("add_generation_prompt", fields.flag("add_generation_prompt", True))
    if fields.flag("continue_final_message", False):
        # The template must not open a new message behind the one that is to be continued.
        arguments.update(continue_final_message=True, add_generation_prompt=False)
    return arguments


def _render(messages: list[Message], arguments: Mapping[str, Any], limits: ModelLimits) -> tuple[int, ...]:
    tokenizer = limits.tokenizer
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
        if not getattr(tokenizer, "chat_template", "unknown"):
            raise ApiError(
                "the model has no chat template; use /v1/completions, or serve an instruct model", param="messages"
            ) from error
        raise ApiError(f"messages: the chat template refuses them: {error}", param="messages") from error
    # The template already wrote the special tokens.
    tokens = tuple(tokenizer.encode(checked_text(text, "messages"), add_special_tokens=False))
    if not tokens:
        raise ApiError("messages: the chat template renders them to no tokens", param="messages")
    return tokens


def _refuse_unsupported_chat(fields: Fields) -> None:
    fields.neutral("tools", [[]], _NO_TOOLS)
    fields.neutral("tool_choice", ["none", "auto"], _NO_TOOLS)
    fields.neutral("functions", [[]], _NO_TOOLS)
    fields.neutral("function_call", ["none", "auto"], _NO_TOOLS)
    fields.neutral("response_format", [{"type": "text"}], _NO_GRAMMAR)
    fields.neutral("modalities", [["text"]], _ONLY_TEXT)
    fields.neutral("audio", [], _ONLY_TEXT)
    fields.neutral("prediction", [], "there is no speculation on given text")
    fields.neutral("web_search_options", [], "there is no search")
    fields.neutral("reasoning_effort", [], "put what the template understands into chat_template_kwargs")
    fields.neutral("verbosity", ["medium"], "ask for it in the messages")
    fields.neutral("store", [False], "replies are not kept")
    fields.neutral("service_tier", ["auto", "default"], "all requests are served alike")
    fields.ignored("parallel_tool_calls", "metadata", "prompt_cache_key", "safety_identifier")
    refuse_unsupported(fields)
