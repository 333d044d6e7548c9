"""What OpenAI clients are sent."""

from __future__ import annotations

from engine.server.parts import NAME, limits
from tiny import tokenizer

from headwater.core.records import ModelResponse
from headwater.engine.server.openai.chat_reply import ChatReply
from headwater.engine.server.openai.chat_request import read_chat
from headwater.engine.server.openai.completion_reply import CompletionReply
from headwater.engine.server.openai.completion_request import read_completion
from headwater.engine.server.output import Piece, PieceMaker, whole

EURO = tokenizer().encode("a€b")  # five tokens: the euro sign is three bytes


def response(tokens, stop_reason="length") -> ModelResponse:
    count = len(tokens)
    return ModelResponse((5,), tuple(tokens), tuple(-0.5 * i for i in range(count)), (3,) * count, stop_reason)


def pieces(plan, tokens, stop_reason="length") -> list[Piece]:
    return [
        whole(response(tokens, stop_reason), tokenizer(), plan.shape.rules, with_offsets=plan.shape.logprobs)
        for _ in plan.requests
    ]


def test_a_completion():
    plan = read_completion({"prompt": ["hi", "ho"], "n": 2, "logprobs": 0, "return_token_ids": True}, limits(), NAME)
    body = CompletionReply(plan, tokenizer()).whole(pieces(plan, EURO), version=3)
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("text_completion", NAME, "version-3")
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24}
    choice = body["choices"][2]
    assert choice["text"] == "a€b"
    assert choice["token_ids"] == tuple(EURO)
    assert choice["prompt_token_ids"] == tuple(tokenizer().encode("ho"))
    assert choice["logprobs"]["token_logprobs"] == (0.0, -0.5, -1.0, -1.5, -2.0)
    assert choice["logprobs"]["text_offset"] == (0, 1, 1, 1, 2)
    assert choice["logprobs"]["tokens"] == ["a", "\ufffd", "\ufffd", "\ufffd", "b"]


def test_a_stop_text_is_cut_from_the_text_and_not_from_the_tokens():
    plan = read_completion({"prompt": "hi", "stop": "€", "return_token_ids": True}, limits(), NAME)
    (choice,) = CompletionReply(plan, tokenizer()).whole(pieces(plan, EURO[:-1], "stop"), 0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    assert choice["token_ids"] == tuple(EURO[:-1])


def test_a_chat_reply():
    plan = read_chat(
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "return_token_ids": True}, limits(), NAME
    )
    body = ChatReply(plan, tokenizer()).whole(pieces(plan, EURO, "abort"), version=0)
    assert body["prompt_token_ids"] == plan.requests[0].input_tokens
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a€b", "refusal": None}
    assert choice["finish_reason"] == "abort"
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], None, None, None, [98]]
    assert all(entry["top_logprobs"] == [] for entry in content)


def streamed(writer, plan) -> list[dict]:
    """Chunks of EURO, one token at a time."""
    maker = PieceMaker(tokenizer(), plan.shape.rules, with_offsets=plan.shape.logprobs)
    chunks = []
    for place, token in enumerate(EURO):
        ending = "length" if place == len(EURO) - 1 else None
        chunks += writer.chunks(0, maker.piece([token], [-1.0], [3], ending))
    return chunks


def test_chunks_of_a_completion():
    plan = read_completion({"prompt": "hi", "stream": True}, limits(), NAME)
    chunks = streamed(CompletionReply(plan, tokenizer()), plan)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "€", "b"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert "usage" not in chunks[0]


def test_chunks_with_tokens_leave_none_out():
    plan = read_completion({"prompt": "hi", "stream": True, "return_token_ids": True, "logprobs": 1}, limits(), NAME)
    choices = [chunk["choices"][0] for chunk in streamed(CompletionReply(plan, tokenizer()), plan)]
    assert [token for choice in choices for token in choice["token_ids"]] == EURO
    assert [offset for choice in choices for offset in choice["logprobs"]["text_offset"]] == [0, 1, 1, 1, 2]
    assert ["prompt_token_ids" in choice for choice in choices] == [True, False, False, False, False]


def test_chunks_of_a_chat():
    options = {"stream": True, "stream_options": {"include_usage": True}}
    plan = read_chat({"messages": [{"role": "user", "content": "hi"}], **options}, limits(), NAME)
    writer = ChatReply(plan, tokenizer())
    chunks = streamed(writer, plan)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "€"}, {"content": "b"}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["usage"] is None for chunk in chunks)
    last = writer.last_chunk(5)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
