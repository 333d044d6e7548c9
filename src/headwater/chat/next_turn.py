"""The tokens between two turns of the model: the end of its message, the messages that follow, and its next opening.

The model's own messages are never rendered or tokenised again. Rendering a whole conversation for every turn would
change them: tokens sampled as ``"1", "2"`` can come back as ``"12"``, and templates may strip spaces or reasoning. The
learner would then train on tokens that were never sampled. A placeholder replaces the model's text, and only
the text that the template writes after the placeholder is tokenised and appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.chat.render import ChatError, encode_rendered, render_chat
from headwater.core.errors import RolloutFailed
from headwater.core.protocols import Tokenizer

_WORDS = "[what-the-model-said]"

MODEL_TURN: Mapping[str, Any] = {"role": "assistant", "content": _WORDS}
"""Placeholder for a message that the model wrote in this episode."""


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
    """
    try:
        text = render_chat(tokenizer, chat, template_args)
    except ChatError as error:
        raise RolloutFailed(f"the chat template cannot render the messages of the next turn ({error})") from error
    if not text.count(_WORDS) == chat.count(MODEL_TURN) > 0:
        raise RolloutFailed(
            f"the chat template shows {text.count(_WORDS)} of {chat.count(MODEL_TURN)} earlier answers of the model, "
            "so the tokens of the next turn are unknown; use a template that shows every answer exactly once"
        )
    tokens = encode_rendered(tokenizer, text.rpartition(_WORDS)[2])
    if response_tokens and response_tokens[-1] in tokens:
        end = tokens.index(response_tokens[-1])
        # Some templates write a space before the end token. The model does not have to.
        if not tokenizer.decode(tokens[:end]).strip():
            tokens = tokens[end + 1 :]
    return tokens
