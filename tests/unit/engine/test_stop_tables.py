"""Which rows are searched for stop strings."""

from __future__ import annotations

import numpy as np
from engine.engine_parts import VOCABULARY, request, running, texts, tokens_of
from engine.stop_parts import KINDS, first_end_after, responses, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tokenizer

from headwater.core.requests import ModelRequest, SamplingParams
from headwater.engine import loop, stops
from headwater.engine.lanes import Drawn, Lanes
from headwater.engine.sequence import EngineSequence
from headwater.engine.stops import PieceIndex, StopTables
from headwater.models.token_pieces import pieces_of

PAGES = np.array([1], np.int32)
START = np.array([5], np.int32)
MANY = 70
"""More sets of stop strings than there are tables."""


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_every_token_that_completes_a_stop_is_in_its_table(kind, data):
    tokens, stops = data.draw(responses(kind))
    pieces = pieces_of(tokenizer_of(kind))
    table = PieceIndex(pieces).may_complete(frozenset(stops))
    for place, token in enumerate(tokens):
        if first_end_after(kind, tokens[: place + 1], place, stops):
            assert table[token]


@settings(max_examples=100, deadline=None)
@given(st.text("abn\n e€", min_size=1, max_size=5))
def test_a_table_has_the_tokens_with_an_end_of_the_stop_in_front_or_all_of_it_inside(stop):
    pieces, data = pieces_of(tokenizer()), stop.encode()
    ends = tuple(data[start:] for start in range(len(data)))
    expected = [piece.startswith(ends) or data in piece for piece in pieces.pieces]
    assert PieceIndex(pieces).may_complete(frozenset([stop])).tolist() == [*expected, False]


def test_a_stop_longer_than_any_token_may_end_in_the_longest():
    pieces = pieces_of(tokenizer())
    longest = max(range(len(pieces.pieces)), key=lambda token: len(pieces.pieces[token]))
    table = PieceIndex(pieces).may_complete(frozenset(["x" + pieces.pieces[longest].decode()]))
    assert table[longest]


def lanes_of(*stops: tuple[str, ...], on_delta=None) -> Lanes:
    lanes = Lanes(len(stops), max_pages=4)
    for row, each in enumerate(stops):
        put(lanes, row, each, on_delta)
    return lanes


def put(lanes: Lanes, row: int, stops: tuple[str, ...], on_delta=None) -> int:
    asked = ModelRequest(str(row), (5,), SamplingParams(16, stop_strings=stops), row)
    sequence = EngineSequence(asked, (), row, on_end=lambda _: None, on_delta=on_delta)
    [lane] = lanes.take([sequence], [row], START, PAGES[None], 0)
    return lane


def drawn(*rows: str) -> Drawn:
    """Each lane has sampled the tokens of one of the texts."""
    drawn = [tokenizer().encode(text) for text in rows]
    tokens = np.full((max(map(len, drawn)), len(rows)), -1, np.int32)
    for column, each in enumerate(drawn):
        tokens[: len(each), column] = each
    return Drawn(0, [], np.arange(len(rows)), tokens, [])


def test_only_rows_with_a_token_that_may_complete_their_stop_are_looked_at():
    lanes = lanes_of(("END",), ("END",), ("ab", "9"), ("ab", "9"))
    tables = StopTables(tokenizer(), lanes)
    assert tables.worth_a_look(drawn("12", "xD", "12", "19")) == [1, 3]
    assert tables.worth_a_look(drawn("", "", "b", "D")) == [2]
    assert tables.worth_a_look(drawn("", "", "", "")) == []


def test_a_token_beyond_the_tokenizers_completes_nothing():
    lanes = lanes_of(("a",))
    tokens = np.array([[VOCABULARY + 5]], np.int32)
    assert StopTables(tokenizer(), lanes).worth_a_look(Drawn(1, [], np.arange(1), tokens, [])) == []


def test_who_follows_a_response_is_told_every_round():
    lanes = lanes_of(("END",), (), on_delta=lambda _: None)
    assert StopTables(tokenizer(), lanes).worth_a_look(drawn("1", "2")) == [0, 1]


def test_a_lane_that_holds_another_sequence_has_the_table_of_that_one():
    lanes = lanes_of(("a",))
    tables = StopTables(tokenizer(), lanes)
    assert tables.worth_a_look(drawn("a")) == [0]
    lanes.give_back(0)
    put(lanes, 0, ("b",))
    assert tables.worth_a_look(drawn("a")) == []
    assert tables.worth_a_look(drawn("b")) == [0]


def test_more_sets_of_stops_than_tables_are_all_looked_for(monkeypatch):
    monkeypatch.setattr(stops, "_MAX_TABLES", 2)
    lanes = lanes_of(("a",), ("b",), ("c",))
    tables = StopTables(tokenizer(), lanes)
    assert tables.worth_a_look(drawn("1", "1", "1")) == [2], "the third has no table, and is looked at every round"
    assert tables.worth_a_look(drawn("a", "1", "c")) == [0, 2]
    lanes.give_back(1)
    put(lanes, 1, ("d",))  # the table of b is free now, and those in use stay
    assert tables.worth_a_look(drawn("1", "1", "1")) == [2]
    assert tables.worth_a_look(drawn("a", "d", "1")) == [0, 1, 2]
    assert tables.worth_a_look(drawn("1", "b", "1")) == [2]


def test_responses_with_more_sets_of_stops_than_tables_end_where_they_should():
    prompt = tokens_of(9)
    with running(max_sequences=MANY) as engine:
        free = texts(engine.generate([request(prompt, key, max_new_tokens=40) for key in range(MANY)]))
        stops = [
            tokenizer().decode(list(tokens[key % 30 :][:3])).strip("\ufffd") or "a" for key, tokens in enumerate(free)
        ]
        asked = [request(prompt, key, max_new_tokens=40, stop_strings=(stop,)) for key, stop in enumerate(stops)]
        cut = texts(engine.generate(asked))
    for tokens, stop, short in zip(free, stops, cut, strict=True):
        end = first_end_after("byte level", list(tokens), 0, (stop,)) if "\ufffd" not in stop else len(short)
        assert short == tokens[:end]


def test_rows_whose_stop_does_not_come_near_are_not_looked_at(monkeypatch):
    looks = []
    cut_at_stop = loop.cut_at_stop
    monkeypatch.setattr(loop, "cut_at_stop", lambda *each: (looks.append(1), cut_at_stop(*each))[1])
    with running(decode_steps=4) as engine:
        engine.generate(
            [request(tokens_of(9), key, max_new_tokens=60, stop_strings=("\x07\x08\x0b",)) for key in range(8)]
        )
    assert len(looks) < 8 * 4, "of 8 responses in 15 rounds, each is looked at when it ends, and hardly before"
