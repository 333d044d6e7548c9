"""Text from tokens, piece by piece."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import tokenizer

from headwater.serving.output import TextRules, TextStream

TOKENS = st.lists(st.integers(0, 511), max_size=80)
CUTS = st.lists(st.integers(0, 80), max_size=8)
CHARACTERS = "ab é你🙂\n"


def decode(tokens: list[int], skip_special_tokens: bool = True) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=skip_special_tokens)


def deltas(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    """``tokens`` in pieces, some of them empty; the last piece holds the last token."""
    edges = [0, *sorted(min(cut, max(0, len(tokens) - 1)) for cut in cuts), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(edges)]


def stream(tokens: list[int], cuts: list[int], rules: TextRules, stop_reason: str) -> tuple[list[str], object]:
    text = TextStream(tokenizer(), rules)
    *first, last = deltas(tokens, cuts)
    pieces = [text.push(delta) for delta in first]
    ending = text.finish(last, stop_reason)
    return [*pieces, ending.text], ending.matched


def first_stop(tokens: list[int], stops: list[str]) -> int | None:
    """Number of tokens up to the one that completes a stop text: where an engine ends the response."""
    for end in range(1, len(tokens) + 1):
        if any(stop in decode(tokens[:end]) for stop in stops):
            return end
    return None


@settings(max_examples=50, deadline=None)
@given(tokens=TOKENS, cuts=CUTS, skip=st.booleans())
@example(tokens=[178, 259, 253, 230], cuts=[1, 2, 3], skip=True)  # one character in four tokens
@example(tokens=[178, 1, 259, 253, 230], cuts=[1, 2, 3, 4], skip=True)  # a special token inside a character
def test_pieces_join_to_the_whole_text(tokens, cuts, skip):
    pieces, matched = stream(tokens, cuts, TextRules(skip_special_tokens=skip), "length")
    assert "".join(pieces) == decode(tokens, skip)
    assert matched is None


@settings(max_examples=50, deadline=None)
@given(text=st.text(CHARACTERS, max_size=30), cuts=CUTS)
def test_no_piece_holds_half_a_character(text, cuts):
    pieces, _ = stream(tokenizer().encode(text), cuts, TextRules(), "length")
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.one_of(TOKENS, st.text(CHARACTERS, max_size=30).map(lambda text: tokenizer().encode(text))),
    cuts=CUTS,
    stops=st.lists(st.text(CHARACTERS, min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_stop_text(tokens, cuts, stops):
    end = first_stop(tokens, stops)
    rules = TextRules(stops=tuple(stops))
    if end is None:
        pieces, _ = stream(tokens, cuts, rules, "length")
        assert "".join(pieces) == decode(tokens)
        return
    pieces, matched = stream(tokens[:end], cuts, rules, "stop")
    whole = decode(tokens[:end])
    assert "".join(pieces) == whole[: min(whole.index(stop) for stop in stops if stop in whole)]
    assert matched in stops


@settings(max_examples=50, deadline=None)
@given(text=st.text("ab", max_size=30), cuts=CUTS)
def test_what_may_begin_a_stop_text_is_held_back_and_nothing_else(text, cuts):
    stop = "abba"
    stream = TextStream(tokenizer(), TextRules(stops=(stop,)))
    sent, seen = "", ""
    for delta in deltas(tokenizer().encode(text), cuts):
        sent += stream.push(delta)
        seen += decode(delta)
        held = seen[len(sent) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)
        longest = max(length for length in range(len(stop)) if seen.endswith(stop[:length]))
        assert len(held) == longest


def test_the_stop_text_stays_where_asked_for():
    tokens = tokenizer().encode("one two three")
    pieces, matched = stream(tokens, [1, 2, 3], TextRules(stops=("three",), keep_stop=True), "stop")
    assert "".join(pieces) == "one two three"
    assert matched == "three"


def test_a_stop_text_that_did_not_end_the_response_is_text():
    # An engine goes past it until the least number of tokens is there.
    tokens = tokenizer().encode("a.b.c.")
    pieces, _ = stream(tokens, [1, 2, 3, 4], TextRules(stops=(".",)), "stop")
    assert "".join(pieces) == "a.b.c"


def test_the_token_that_ended_the_response_is_no_text():
    tokens = [*tokenizer().encode("go on"), 1]
    for cuts in ([], [1], [2, 3]):
        pieces, matched = stream(tokens, cuts, TextRules(skip_special_tokens=False), "stop")
        assert "".join(pieces) == "go on"
        assert matched == 1
    pieces, matched = stream(tokens, [1], TextRules(skip_special_tokens=False, keep_stop=True), "stop")
    assert "".join(pieces) == "go on<|end|>"
    assert matched == 1


def test_an_aborted_response_keeps_its_text():
    text = TextStream(tokenizer(), TextRules(stops=("xyz",)))
    first = text.push(tokenizer().encode("abcx"))
    assert first == "abc"
    assert text.finish([], "abort").text == "x"
