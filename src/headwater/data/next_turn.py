"""The tokens between two turns of the model: its message closed, the messages that follow, its next one opened.

A conversation that is rendered and tokenised anew for each turn drifts: words that the model wrote as ``"1", "2"`` come
back as ``"12"``, templates strip spaces and thoughts, and the learner trains on tokens that nobody sampled. So the
model's words are never rendered. A placeholder stands for them, and only what the template writes after it is
tokenised, to be added to the tokens that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.core.errors import RolloutFailed
from headwater.core.protocols import Tokenizer

_WORDS = "[what-the-model-said]"

MODEL_TURN: Mapping[str, Any] = {"role": "assistant", "content": _WORDS}
"""Stands in a chat wherever the model has spoken in this episode."""


def tokens_until_next_turn(
    tokenizer: Tokenizer,
    chat: Sequence[Mapping[str, Any]],
    response_tokens: Sequence[int],
    template_args: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """What follows the last ``MODEL_TURN`` of ``chat``, up to where the model speaks again.

    A template ends the model's message with an end token. Where ``response_tokens``, what the model wrote, end with it
    already, it is not written a second time; where the model was cut off before it could end its message, the end token
    comes from the template, as a token that was read and not sampled.
    """
    arguments = {**(template_args or {}), "add_generation_prompt": True, "tokenize": False}
    text = str(tokenizer.apply_chat_template([dict(message) for message in chat], **arguments))
    if not text.count(_WORDS) == chat.count(MODEL_TURN) > 0:
        raise RolloutFailed(
            f"the chat template shows {text.count(_WORDS)} of {chat.count(MODEL_TURN)} earlier answers of the model, "
            "so the tokens of the next turn cannot be told; use a template that keeps every answer, once"
        )
    tokens = tokenizer.encode(text.rpartition(_WORDS)[2], add_special_tokens=False)
    if response_tokens and response_tokens[-1] in tokens:
        end = tokens.index(response_tokens[-1])
        # Some templates put a space before the end token, which the model had no need to write.
        if not tokenizer.decode(tokens[:end]).strip():
            tokens = tokens[end + 1 :]
    return tuple(tokens)
