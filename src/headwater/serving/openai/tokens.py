"""Calls about the tokenizer, with vLLM's names, and the server's version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

import headwater
from headwater.serving.errors import ApiError
from headwater.serving.fields import Fields
from headwater.serving.generation import reply
from headwater.serving.openai.chat import read_messages_as_tokens
from headwater.serving.openai.plan import check_model
from headwater.serving.output import token_text
from headwater.serving.state import STATE, ServerState


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return reply(await state.read(request, lambda body: _tokenize(body, state)))


async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return reply(await state.read(request, lambda body: _detokenize(body, state)))


async def tokenizer_info(request: web.Request) -> web.Response:
    tokenizer: Any = request.app[STATE].tokenizer
    names = ("eos_token", "bos_token", "pad_token", "unk_token", "chat_template")
    known = {name: getattr(tokenizer, name, None) for name in names}
    return reply({"tokenizer_class": type(tokenizer).__name__, **known})


async def version(_: web.Request) -> web.Response:
    return reply({"version": headwater.__version__})


def _tokenize(body: Mapping[str, Any], state: ServerState) -> dict[str, Any]:
    """The tokens of a ``prompt``, or of the ``messages`` of a chat."""
    fields, limits = Fields(body), state.limits
    check_model(fields, state.options.served_name)
    with_texts = fields.flag("return_token_strs", False)
    is_chat = body.get("messages") is not None
    if is_chat == (body.get("prompt") is not None):
        raise ApiError("prompt, messages: give exactly one of the two", param="prompt")
    if is_chat:
        tokens = read_messages_as_tokens(fields, limits)
        fields.neutral("add_special_tokens", [False], "the chat template adds them")
    else:
        text = limits.short_text(fields.raw("prompt"), "prompt")
        tokens = tuple(state.tokenizer.encode(text, add_special_tokens=fields.flag("add_special_tokens", True)))
    fields.done()
    return {
        "count": len(tokens),
        "max_model_len": limits.engine.max_request_tokens,
        "tokens": tokens,
        "token_strs": [token_text(state.tokenizer, token) for token in tokens] if with_texts else None,
    }


def _detokenize(body: Mapping[str, Any], state: ServerState) -> dict[str, Any]:
    fields = Fields(body)
    check_model(fields, state.options.served_name)
    tokens = fields.raw("tokens")
    fields.done()
    most = state.limits.engine.max_model_tokens
    if isinstance(tokens, list) and len(tokens) > most:
        raise ApiError(f"tokens: {len(tokens)} tokens are more than the model supports ({most})", param="tokens")
    ids = () if tokens == [] else state.limits.tokens_of_ids(tokens, "tokens")
    text = state.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {"prompt": text}
