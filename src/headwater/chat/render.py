"""The chat renderer: messages to text with the tokenizer's chat template, and that text to tokens.

Every chat in Headwater is rendered here: prompts of a dataset, messages added during an episode, requests to the server
and conversations shown to a reward model.

    text = render_chat(tokenizer, messages, {"enable_thinking": False})
    tokens = encode_rendered(tokenizer, text)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from headwater.core.errors import HeadwaterError
from headwater.core.protocols import Tokenizer

RESERVED_ARGUMENTS = ("tokenize", "return_dict", "return_tensors", "conversation", "chat_template")
"""Arguments of ``apply_chat_template`` that the renderer sets itself or that no template receives."""


class ChatTemplateOwner(Protocol):
    """A tokenizer, or a processor of a multi-modal model."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class ChatError(HeadwaterError):
    """The chat template cannot render a chat."""

    def __init__(self, cause: str, *, has_template: bool) -> None:
        super().__init__(cause)
        self.has_template = has_template
        """False if the tokenizer has no chat template at all."""


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
    try:
        return str(owner.apply_chat_template([dict(message) for message in messages], **arguments))
    except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
        if not getattr(owner, "chat_template", "unknown"):
            raise ChatError(f"{type(owner).__name__} has no chat template", has_template=False) from error
        raise ChatError(f"{type(error).__name__}: {error}", has_template=True) from error


def encode_rendered(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokens of rendered text. The template has written all special tokens, so the tokenizer must not add any."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))
