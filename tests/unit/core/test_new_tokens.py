"""The binary form of new tokens."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from cases import case
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.new_tokens import STOP_REASONS, TOKEN, BadFrame, NewTokens
from headwater.core.requests import Delta

INT32 = st.integers(-(2**31), 2**31 - 1)
NUMBERS = st.integers(0, 2**63 - 1)
TOKENS = st.lists(st.tuples(INT32, st.floats(width=32), INT32), max_size=5)
ENDS = st.lists(st.tuples(NUMBERS, st.sampled_from(STOP_REASONS)), max_size=4)


def of_row(number, tokens):
    columns = tuple(zip(*tokens, strict=True)) or ((), (), ())
    return NewTokens.of_delta(number, Delta(*columns))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(NUMBERS, TOKENS), max_size=5), ENDS)
def test_rows_and_ends_arrive_as_they_were_sent(rows, ends):
    sent = NewTokens.join([of_row(*row) for row in rows], ends)
    arrived = NewTokens.decode(sent.encode())
    assert list(arrived.ended) == ends
    read = [(number, np.frombuffer(data, TOKEN)) for number, data in arrived.rows()]
    assert [number for number, _ in read] == [number for number, _ in rows]
    for (_, found), (_, expected) in zip(read, rows, strict=True):
        assert found.tobytes() == np.array(expected, TOKEN).tobytes()


def test_anything_else_is_refused_by_name():
    whole = NewTokens.join([of_row(7, [(1, -0.5, 2), (3, -1.5, 2)])], [(7, "stop")]).encode()
    start = struct.calcsize("<4sHHIIII")
    wrong_count = bytearray(whole)
    wrong_count[-2] = 9  # the highest byte of the row's count
    for name, frame, message in [
        ("empty", b"", "not a frame of new tokens: 0 bytes"),
        ("text", b'[{"id": 7, "tokens": [1]}]', "not a frame of new tokens: 26 bytes"),
        ("of another version", whole[:4] + b"\x02\x00" + whole[6:], "format version 2, not 1; use the same release"),
        ("cut", whole[:-1], f"a frame of {len(whole) - 1} bytes that should have {len(whole)}"),
        ("too long", whole + b"\0", "bytes that should have"),
        ("rows of other lengths", bytes(wrong_count), "rows do not hold 2 tokens"),
        ("an unknown reason", whole[:-1] + b"\x09", "the stop reason 9"),
        ("a huge size", whole[:8] + b"\xff" * 12 + whole[20:], "bytes that should have"),
    ]:
        with case(name), pytest.raises(BadFrame, match=message):
            NewTokens.decode(frame)
    assert start == 24
