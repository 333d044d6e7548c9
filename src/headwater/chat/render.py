"""The chat renderer: messages to text with the tokenizer's chat template, and that text to tokens.

Every chat in Headwater is rendered here: prompts of a dataset, messages added during an episode, requests to the server
and conversations shown to a reward model.

    text = render_chat(tokenizer, messages, {"enable_thinking": False})
    tokens = encode_rendered(tokenizer, text)

``tokens_until_next_turn`` gives the tokens between two turns of the model: the end of its message, the messages that
follow, and its next opening.

The model's own messages are never rendered or tokenised again. Rendering a whole conversation for every turn would
change them: tokens sampled as ``"1", "2"`` can come back as ``"12"``, and templates may strip spaces or reasoning. The
learner would then train on tokens that were never sampled. A placeholder replaces the model's text, and only
the text that the template writes after the placeholder is tokenised and appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from jinja2 import TemplateError

from headwater.core.errors import HeadwaterError, RolloutFailed
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
    try:
        return str(owner.apply_chat_template([dict(message) for message in messages], **arguments))
    except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
        if not has_template(owner):
            raise ChatError("the model has no chat template", has_template=False) from error
        raise ChatError(f"{type(error).__name__}: {error}", has_template=True) from error


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


_WORDS = "[what-the-model-said]"

MODEL_TURN: Mapping[str, Any] = {"role": "assistant", "content": _WORDS}
"""Placeholder for a message that the model wrote in this episode. It may have ``tool_calls`` in addition."""


def is_model_turn(message: Mapping[str, Any]) -> bool:
    return message.get("content") == _WORDS


def tokens_until_next_turn(
    tokenizer: Tokenizer,
    chat: Sequence[Mapping[str, Any]],
    response_tokens: Sequence[int],
    template_args: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """The tokens that follow the last ``MODEL_TURN`` of ``chat``, up to the start of the model's next message.

    The template closes the model's message with an end token. If ``response_tokens`` (the model's output) already end
    with it, the end token is not repeated. If the model was cut off before its end token, the template's end token is
    included; it was not sampled and is not trained.

    If the last ``MODEL_TURN`` has ``tool_calls``, the text that the template writes for them is left out.
    """
    turns = [index for index, message in enumerate(chat) if is_model_turn(message)]
    text = _render(tokenizer, chat, template_args)
    if not text.count(_WORDS) == len(turns) > 0:
        raise RolloutFailed(
            f"the chat template shows {text.count(_WORDS)} of {len(turns)} earlier answers of the model, so the tokens "
            "of the next turn are unknown; use a template that shows every answer exactly once, or call tell() without "
            "tool_calls"
        )
    after = text.rpartition(_WORDS)[2]
    if "tool_calls" in chat[turns[-1]]:
        after = _without_calls(after, _closing(tokenizer, [*chat[: turns[-1]], MODEL_TURN], template_args))
    tokens = encode_rendered(tokenizer, after)
    if response_tokens and response_tokens[-1] in tokens:
        end = tokens.index(response_tokens[-1])
        # Some templates write a space before the end token. The model does not have to.
        if not tokenizer.decode(tokens[:end]).strip():
            tokens = tokens[end + 1 :]
    return tokens


def _render(
    tokenizer: Tokenizer,
    chat: Sequence[Mapping[str, Any]],
    template_args: Mapping[str, Any] | None,
    add_generation_prompt: bool = True,
) -> str:
    try:
        return render_chat(tokenizer, chat, template_args, add_generation_prompt=add_generation_prompt)
    except ChatError as error:
        remedy = "" if error.has_template else "; set model.chat_template"
        raise RolloutFailed(f"the messages of the next turn cannot be rendered ({error}){remedy}") from error


def _closing(tokenizer: Tokenizer, chat: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None) -> str:
    """What the template writes after every message of the model, for example ``<|im_end|>`` and a line break."""
    followed = _render(tokenizer, [*chat, {"role": "user", "content": "?"}], template_args)
    last = _render(tokenizer, chat, template_args, add_generation_prompt=False)
    ends = zip(followed.rpartition(_WORDS)[2], last.rpartition(_WORDS)[2], strict=False)
    return "".join(mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], ends))


def _without_calls(text: str, closing: str) -> str:
    """``text`` from ``closing`` on. Before it, the template has written the tool calls."""
    start = text.find(closing) if closing.strip() else -1
    if start < 0:
        raise RolloutFailed(
            "the chat template does not mark the end of a message with tool calls, so the tokens of the next turn are "
            "unknown; call tell() without tool_calls"
        )
    return text[start:]
