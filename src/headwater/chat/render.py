"""The chat renderer: messages to text with the tokenizer's chat template, and that text to tokens.

Every chat in Headwater is rendered here: prompts of a dataset, messages added during an episode, requests to the server
and conversations shown to a reward model.

    text = render_chat(tokenizer, messages, {"enable_thinking": False})
    tokens = encode_rendered(tokenizer, text)

``next_turn.py`` gives the tokens between two turns of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from jinja2 import TemplateError

from headwater.core.errors import HeadwaterError
from headwater.core.tokenizer import Tokenizer

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
