"""What OpenAI clients are sent."""

from __future__ import annotations

import bisect
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from serving.parts import NAME, OPTIONS, limits
from tiny import tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headwater.core.requests import ModelResponse, PromptScores
from headwater.serving.openai.chat import ChatReply, read_chat
from headwater.serving.openai.completions import CompletionReply, read_completion
from headwater.serving.output import OutputPiece, PieceMaker, TextRules, whole

EURO = tokenizer().encode("a€b")  # five tokens: the euro sign is three bytes


def response(tokens, stop_reason="length") -> ModelResponse:
    count = len(tokens)
    return ModelResponse((5,), tuple(tokens), tuple(-0.5 * i for i in range(count)), (3,) * count, stop_reason)


def pieces(plan, tokens, stop_reason="length") -> list[OutputPiece]:
    return [
        whole(response(tokens, stop_reason), tokenizer(), plan.shape.rules, with_offsets=plan.shape.logprobs)
        for _ in plan.requests
    ]


def test_a_completion():
    plan = read_completion({"prompt": ["hi", "ho"], "n": 2, "logprobs": 0, "return_token_ids": True}, limits(), OPTIONS)
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


def offsets_of(tokens) -> tuple[int, ...]:
    return whole(response(tokens), tokenizer(), TextRules(), with_offsets=True).offsets


def character_starts(data: bytes) -> list[int]:
    """Where in ``data`` each character of its text begins, U+FFFD among them."""
    starts, place = [], 0
    while place < len(data):
        starts.append(place)
        try:
            place += len(data[place:].decode()[0].encode())
        except UnicodeDecodeError as error:
            place += error.end if error.start == 0 else len(data[place:].decode(errors="ignore")[0].encode())
    return starts


def test_the_token_after_a_broken_character_begins_behind_it():
    broken, star, mark = EURO[1], *tokenizer().encode(" *!")
    assert tokenizer().decode([broken, star, mark]) == "\ufffd *!"
    assert offsets_of([broken, star, mark]) == (0, 1, 3)
    end = tokenizer().eos_token_id  # has no text
    assert offsets_of([broken, end]) == (0, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.integers(6, 511), st.sampled_from(EURO)), max_size=30))
def test_every_token_has_the_offset_of_the_character_it_begins_in(tokens):
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}
    parts = [bytes(of_character[each] for each in name) for name in tokenizer().convert_ids_to_tokens(tokens)]
    starts = character_starts(b"".join(parts))
    begins = itertools.accumulate((len(part) for part in parts[:-1]), initial=0)
    expected = [bisect.bisect_right(starts, begin) - 1 for begin in begins] if tokens else []
    assert offsets_of(tokens) == tuple(expected)


def test_offsets_where_every_byte_has_a_replacement_character():
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "b"]
    model = models.BPE({name: place for place, name in enumerate(names)}, [], byte_fallback=True)
    plain = Tokenizer(model)
    plain.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fallback = PreTrainedTokenizerFast(tokenizer_object=plain)
    assert fallback.decode([0xE2, 0x82]) == "\ufffd\ufffd"
    for tokens, expected in [
        ([*"€".encode(), *"€".encode(), 256], (0, 0, 0, 1, 1, 1, 2)),
        ([256, 0xE2, 0x82, 256], (0, 1, 1, 3)),
    ]:
        assert whole(response(tokens), fallback, TextRules(), with_offsets=True).offsets == expected


def test_a_stop_text_is_cut_from_the_text_and_not_from_the_tokens():
    plan = read_completion({"prompt": "hi", "stop": "€", "return_token_ids": True}, limits(), OPTIONS)
    (choice,) = CompletionReply(plan, tokenizer()).whole(pieces(plan, EURO[:-1], "stop"), 0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    assert choice["token_ids"] == tuple(EURO[:-1])


def test_a_chat_reply():
    plan = read_chat(
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "return_token_ids": True}, limits(), OPTIONS
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
        top = [((token, -1.0), (80, -2.0))] if plan.requests[0].sampling.num_top_logprobs else ()
        chunks += writer.chunks(0, maker.piece([token], [-1.0], [3], ending, top), version=3)
    return chunks


def test_chunks_of_a_completion():
    plan = read_completion({"prompt": "hi", "stream": True}, limits(), OPTIONS)
    chunks = streamed(CompletionReply(plan, tokenizer()), plan)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "€", "b"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert "usage" not in chunks[0]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {"version-3"}


def test_chunks_with_tokens_leave_none_out():
    plan = read_completion({"prompt": "hi", "stream": True, "return_token_ids": True, "logprobs": 1}, limits(), OPTIONS)
    choices = [chunk["choices"][0] for chunk in streamed(CompletionReply(plan, tokenizer()), plan)]
    assert [token for choice in choices for token in choice["token_ids"]] == EURO
    assert [offset for choice in choices for offset in choice["logprobs"]["text_offset"]] == [0, 1, 1, 1, 2]
    assert ["prompt_token_ids" in choice for choice in choices] == [True, False, False, False, False]
    tops = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
    other = tokenizer().decode([80])
    assert tops == [{text: -1.0, other: -2.0} for text in ["a", "\ufffd", "\ufffd", "\ufffd", "b"]]


def test_an_echo_puts_the_prompt_before_the_completion():
    plan = read_completion({"prompt": "€hi", "echo": True, "logprobs": 1, "max_tokens": 5}, limits(), OPTIONS)
    prompt = plan.requests[0].input_tokens
    scores = PromptScores((-1.0,) * (len(prompt) - 1), (((70, -0.5),),) * (len(prompt) - 1))
    maker = PieceMaker(tokenizer(), plan.shape.rules, with_offsets=True)
    piece = maker.piece(EURO, [-0.25] * 5, [0] * 5, "length", [((70, -3.0),)] * 5, scores)
    (choice,) = CompletionReply(plan, tokenizer()).whole([piece], 0)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "€hia€b"
    assert logprobs["token_logprobs"] == (None, *[-1.0] * (len(prompt) - 1), *[-0.25] * 5)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][-1] == {tokenizer().decode([70]): -3.0, "b": -0.25}
    assert logprobs["text_offset"][-5:] == (3, 4, 4, 4, 5)
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(prompt) + 5
    # In a stream, the first chunk contains the prompt.
    writer, maker = CompletionReply(plan, tokenizer()), PieceMaker(tokenizer(), plan.shape.rules, with_offsets=True)
    texts = []
    for place, token in enumerate(EURO):
        top, ending = [((70, -3.0),)], "length" if place == 4 else None
        piece = maker.piece([token], [-0.25], [0], ending, top, None if place else scores)
        texts += [chunk["choices"][0]["text"] for chunk in writer.chunks(0, piece, 0)]
    assert "".join(texts) == "€hia€b"
    assert texts[0] == "€hia"


def test_a_chat_lists_the_alternatives_of_each_token():
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    plan = read_chat(body, limits(), OPTIONS)
    maker = PieceMaker(tokenizer(), plan.shape.rules)
    piece = maker.piece(EURO[:1], [-0.5], [0], "length", [((EURO[0], -0.5), (EURO[1], -1.5))])
    (choice,) = ChatReply(plan, tokenizer()).whole([piece], 0)["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert entry["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "\ufffd", "logprob": -1.5, "bytes": None},
    ]


def test_chunks_of_a_chat():
    options = {"stream": True, "stream_options": {"include_usage": True}}
    plan = read_chat({"messages": [{"role": "user", "content": "hi"}], **options}, limits(), OPTIONS)
    writer = ChatReply(plan, tokenizer())
    chunks = streamed(writer, plan)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "€"}, {"content": "b"}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["usage"] is None for chunk in chunks)
    last = writer.last_chunk(5, version=4)
    assert last["choices"] == []
    assert [chunk["system_fingerprint"] for chunk in (*chunks, last)] == [*["version-3"] * 5, "version-4"]
    assert last["usage"]["completion_tokens"] == 5
