"""Reads, checks and renders chat messages, and splits placeholders of images and videos."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from jinja2 import TemplateError

from headwater.core.errors import DataError, HeadwaterError
from headwater.core.protocols import Tokenizer

Message = dict[str, Any]


def read_messages(row: Mapping[str, Any], key: str, system_prompt: str, place: str) -> list[Message]:
    """The messages in column ``key``. A plain string is read as one user message."""
    if row.get(key) is None:
        have = ", ".join(row) or "none"
        raise DataError(f"{place}: no {key!r}; the row has {have}; set data.prompt_key to the column with the chat")
    value = row[key]
    if not isinstance(value, (str, list, tuple)):
        raise DataError(f"{place}: {key} is a {type(value).__name__}; must be a list of messages or a string")
    if not value or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{place}: {key} is empty; write a prompt or remove the row")
    if isinstance(value, str):
        messages: list[Message] = [{"role": "user", "content": value}]
    else:
        messages = [_checked(message, f"{place}: {key}[{number}]") for number, message in enumerate(value)]
    if system_prompt and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def split_placeholders(messages: Sequence[Message], kinds: Sequence[str]) -> list[Message]:
    """Split text content into parts: ``"<image>What is this?"`` becomes an image part and a text part."""
    pattern = re.compile("(" + "|".join(f"<{kind}>" for kind in kinds) + ")")
    return [
        {**message, "content": _parts(message["content"], pattern)} if isinstance(message["content"], str) else message
        for message in messages
    ]


def without_nones(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys whose value is None. Parquet adds them to rows that lack a key, and chat templates would see them."""
    return {key: value for key, value in mapping.items() if value is not None}


def _parts(content: str, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    segments = [segment for segment in pattern.split(content) if segment]
    return [
        {"type": segment[1:-1]} if pattern.fullmatch(segment) else {"type": "text", "text": segment}
        for segment in segments
    ]


def _checked(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is a {type(message).__name__}; must be a message {{'role': ..., 'content': ...}}")
    known = without_nones(message)
    if not isinstance(known.get("role"), str) or not known["role"]:
        raise DataError(f"{where}.role = {known.get('role')!r}; must be 'system', 'user', 'assistant' or 'tool'")
    content = known.setdefault("content", None)
    if isinstance(content, (list, tuple)):
        known["content"] = [_checked_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
    elif content is None and "tool_calls" not in known:
        raise DataError(f"{where}.content is missing; must be a string or a list of parts")
    elif content is not None and not isinstance(content, str):
        raise DataError(f"{where}.content is a {type(content).__name__}; must be a string or a list of parts")
    return known


def _checked_part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise DataError(f"{where} = {part!r}; must be a part such as {{'type': 'text', 'text': ...}}")
    return without_nones(part)


RESERVED_ARGUMENTS = ("tokenize", "return_dict", "return_tensors", "conversation", "chat_template")
"""Arguments of ``apply_chat_template`` that the renderer sets itself or that no template receives."""


_REFUSALS = (TemplateError, TypeError, ValueError, AttributeError, KeyError)
"""What a chat template raises for messages that it cannot render."""


class ChatTemplateOwner(Protocol):
    """A tokenizer, or a processor of a multi-modal model."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class ChatError(HeadwaterError):
    """The chat template cannot render a chat."""

    def __init__(self, cause: str, *, has_template: bool) -> None:
        super().__init__(cause)
        self.has_template = has_template
        """False if the tokenizer has no chat template at all."""


def has_template(owner: object) -> bool:
    """Whether a tokenizer or processor has a chat template. One that does not tell is assumed to have one."""
    return bool(getattr(owner, "chat_template", "unknown"))


def render_chat(
    owner: ChatTemplateOwner,
    messages: Sequence[Mapping[str, Any]],
    template_args: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The chat as text. ``add_generation_prompt`` opens the model's next message at the end.

    Raises ``ChatError`` with the cause. The caller adds which messages these are and how to fix them.
    """
    arguments = {"add_generation_prompt": add_generation_prompt, **(template_args or {}), "tokenize": False}
    if _needs_parts(owner):
        messages = [_with_parts(message) for message in messages]
    try:
        return str(owner.apply_chat_template([dict(message) for message in messages], **arguments))
    except _REFUSALS as error:
        if not has_template(owner):
            raise ChatError("the model has no chat template", has_template=False) from error
        if any(message.get("tool_calls") for message in messages):
            # A few templates, such as DeepSeek's, expect the arguments of calls as text.
            with suppress(*_REFUSALS):
                return str(owner.apply_chat_template([_with_text_arguments(each) for each in messages], **arguments))
        raise ChatError(f"{type(error).__name__}: {error}", has_template=True) from error


_PROBE = "probe"
_parts_needed: dict[str, bool] = {}
"""By the text of the chat template."""


def _needs_parts(owner: ChatTemplateOwner) -> bool:
    """Whether a template, such as SmolVLM's, leaves out a content that is text, and shows a list of parts."""
    template = getattr(owner, "chat_template", None)
    if not isinstance(template, str):
        return False
    if template not in _parts_needed:
        message = {"role": "user", "content": _PROBE}
        _parts_needed[template] = not _shows_probe(owner, message) and _shows_probe(owner, _with_parts(message))
    return _parts_needed[template]


def _shows_probe(owner: ChatTemplateOwner, message: Mapping[str, Any]) -> bool:
    try:
        return _PROBE in str(owner.apply_chat_template([dict(message)], tokenize=False))
    except _REFUSALS:
        return False


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """``message`` with the arguments of its tool calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function, arguments = call["function"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else dict(message)


def encode_plain(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokens of text that no template has rendered, with the token that the model expects at the beginning, if any."""
    tokens = tokenizer.encode(text)
    # Some tokenizers also add an end token, after which a model would not continue the text.
    if tokens and tokens[-1] == tokenizer.eos_token_id and encode_rendered(tokenizer, text)[-1:] != (tokens[-1],):
        tokens = tokens[:-1]
    return tuple(tokens)


def encode_rendered(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokens of rendered text. The template has written all special tokens, so the tokenizer must not add any."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def text_decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """A function from tokens to their text without special tokens, the same text that ``tokenizer.decode`` returns.

    For a short reply, what transformers does around decoding takes three times as long as decoding. The function
    leaves it out if all that it would do is to remove spaces, and it leaves them in a text that has all of these.
    """

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=True)

    if "transformers" not in sys.modules:  # slow to import, and this tokenizer does not come from there
        return decode
    from transformers import PreTrainedTokenizerFast as Usual

    if not isinstance(tokenizer, Usual):
        return decode
    if type(tokenizer).decode is not Usual.decode or type(tokenizer)._decode is not Usual._decode:
        return decode
    quick = tokenizer.backend_tokenizer.decode
    probe = tokenizer.encode(_REMOVABLE_SPACES, add_special_tokens=False)
    if not decode(probe) == quick(probe, skip_special_tokens=True) == _REMOVABLE_SPACES:
        return decode
    return lambda tokens: str(quick(tokens, skip_special_tokens=True))


_REMOVABLE_SPACES = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're k"
"""All that ``clean_up_tokenization_spaces`` of transformers would change."""


REASONING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""What begins and ends the reasoning of a model."""


def opens_reasoning(text: str) -> bool:
    """Whether a rendered chat ends with the beginning of reasoning, so that the model continues inside it."""
    return text.rstrip().endswith(tuple(REASONING))


_WORDS = "[what-the-model-said]"

MODEL_TURN: Mapping[str, Any] = {"role": "assistant", "content": _WORDS}
"""Placeholder for a message that the model wrote in this episode. It may have ``tool_calls`` in addition."""


def is_model_turn(message: Mapping[str, Any]) -> bool:
    return message.get("content") == _WORDS


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens and their ids: tokens that decoding leaves out with ``skip_special_tokens``."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token.content): int(number) for number, token in added.items() if token.special}


def kinds_of_parts(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """The types of the parts of messages whose content is a list, such as ``text`` and ``image``."""
    kinds: set[str] = set()
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            kinds.update(str(part.get("type", "text")) for part in content if isinstance(part, Mapping))
    return kinds
