"""Handlers of ``/v1``, of calls about the tokenizer (with vLLM's names), and of the server's version."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from aiohttp import web

import headwater
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields
from headwater.serving.generation import generate_all, reply, send_events, stream_all
from headwater.serving.openai.chat import ChatReply, read_chat, read_messages_as_tokens
from headwater.serving.openai.completions import CompletionReply, read_completion
from headwater.serving.openai.plan import CallPlan, check_model, unknown_model
from headwater.serving.openai.responses import ResponseWriter, chat_body, event_bytes
from headwater.serving.output import PieceMaker, token_text, whole
from headwater.serving.state import STATE, ServerState

Writer = CompletionReply | ChatReply


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    plan = await state.read(request, lambda body: _checked(state, read_completion(body, state.limits, state.options)))
    return await _answer(request, state, plan, CompletionReply(plan, state.tokenizer))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    plan = await state.read(
        request,
        lambda body: _checked(state, read_chat(body, state.limits, state.options, state.parser)),
    )
    return await _answer(request, state, plan, ChatReply(plan, state.tokenizer))


async def responses(request: web.Request) -> web.StreamResponse:
    """``/v1/responses`` as a chat. Replies are not stored, so a request has the whole conversation."""
    state = request.app[STATE]

    def read(body: Mapping[str, Any]) -> tuple[CallPlan, ResponseWriter]:
        if body.get("previous_response_id") is not None:
            previous = body["previous_response_id"]
            raise wrong("previous_response_id", previous, "replies are not stored; send the whole conversation")
        plan = read_chat(chat_body(body), state.limits, state.options, state.parser)
        return _checked(state, plan), ResponseWriter(body)

    plan, writer = await state.read(request, read)
    chat = ChatReply(plan, state.tokenizer)
    if not plan.shape.stream:
        return await _answer(request, state, plan, chat, writer.whole)
    with state.active.hold(plan.names, "id"):
        return await send_events(request, writer.events(_events(state, plan, chat)), event_bytes)


async def models(request: web.Request) -> web.Response:
    return reply({"object": "list", "data": [_model(request.app[STATE])]})


async def model(request: web.Request) -> web.Response:
    state, name = request.app[STATE], request.match_info["model"]
    if name not in state.options.names:
        raise unknown_model(name, state.options)
    return reply(_model(state))


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.options.served_name,
        "object": "model",
        "created": 0,
        "owned_by": "headwater",
        # The largest request that is accepted: the KV cache may hold less than the model supports.
        "max_model_len": state.engine.limits.max_request_tokens,
    }


def _checked(state: ServerState, plan: CallPlan) -> CallPlan:
    """``plan``, if the engine can serve all its prompts."""
    for each in plan.requests[:: plan.num_samples]:
        state.check_features(each)
        state.engine.check(each)
    return plan


async def _answer(
    request: web.Request,
    state: ServerState,
    plan: CallPlan,
    writer: Writer,
    formatted: Callable[[dict[str, Any]], dict[str, Any]] = lambda made: made,
) -> web.StreamResponse:
    with state.active.hold(plan.names, "id"):
        if plan.shape.stream:
            return await send_events(request, _events(state, plan, writer))
        responses = await generate_all(state.engine, plan.requests)

    def build() -> dict[str, Any]:
        rules, with_offsets = plan.shape.rules, plan.shape.logprobs
        pieces = [whole(response, state.tokenizer, rules, with_offsets=with_offsets) for response in responses]
        versions = [version for piece in pieces for version in piece.versions]
        return formatted(writer.whole(pieces, max(versions, default=state.engine.get_version())))

    num_tokens = sum(len(response.output_tokens) for response in responses)
    if plan.shape.echo:
        num_tokens += sum(len(each.input_tokens) for each in plan.requests)
    return await state.write(build, num_tokens)


async def _events(state: ServerState, plan: CallPlan, writer: Writer) -> AsyncGenerator[dict[str, Any], None]:
    shape = plan.shape
    makers = [PieceMaker(state.tokenizer, shape.rules, with_offsets=shape.logprobs) for _ in range(len(plan.requests))]
    num_tokens, version = 0, state.engine.get_version()
    async with aclosing(stream_all(state.engine, plan.requests)) as deltas:
        async for place, delta in deltas:
            num_tokens += len(delta.tokens)
            version = max(delta.versions, default=version)
            piece = makers[place].piece(
                delta.tokens,
                delta.logprobs,
                delta.versions,
                delta.stop_reason,
                delta.top_logprobs,
                delta.prompt_scores,
            )
            for chunk in writer.chunks(place, piece, version):
                yield chunk
    if shape.include_usage:
        yield writer.last_chunk(num_tokens, version)


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
    check_model(fields, state.options)
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
    check_model(fields, state.options)
    tokens = fields.raw("tokens")
    fields.done()
    most = state.limits.engine.max_model_tokens
    if isinstance(tokens, list) and len(tokens) > most:
        raise ApiError(f"tokens: {len(tokens)} tokens are more than the model supports ({most})", param="tokens")
    ids = () if tokens == [] else state.limits.tokens_of_ids(tokens, "tokens")
    text = state.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {"prompt": text}


ROUTES = [
    web.post("/v1/completions", completions),
    web.post("/v1/chat/completions", chat_completions),
    web.post("/v1/responses", responses),
    web.get("/v1/models", models),
    web.get("/v1/models/{model:.+}", model),  # a name may contain slashes
    web.post("/tokenize", tokenize),
    web.post("/detokenize", detokenize),
    web.get("/tokenizer_info", tokenizer_info),
    web.get("/version", version),
]
