"""Messages, values and the filter of system calls, without processes."""

from __future__ import annotations

import contextlib
import math
import struct
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.sandbox.inside import frames, seccomp, values
from headwater.sandbox.inside.examiner import free_names

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.sets(st.integers() | st.text(), max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


def refuse(value: Any) -> Any:
    raise TypeError(type(value).__name__)


@given(PLAIN)
def test_plain_values_survive_the_way(value: Any):
    left = frames.encode({"value": values.encode(value, refuse)})
    reader = frames.FrameReader()
    result = None
    while left:
        assert result is None
        size = min(7, reader.wants)
        result, left = reader.feed(left[:size]), left[size:]
    assert result is not None
    decoded = values.decode(result["value"], refuse)
    assert decoded == value
    assert type(decoded) is type(value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(raw: bytes):
    reader = frames.FrameReader()
    left = raw
    while left:
        piece, left = left[: reader.wants], left[reader.wants :]
        try:
            if reader.feed(piece) is not None:
                return
        except frames.BrokenFrame:
            return


JUNK = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "value", "items"]), inner),
    max_leaves=8,
)


@given(JUNK)
def test_any_answer_of_a_program_is_a_value_or_one_of_the_known_errors(answer: Any):
    with contextlib.suppress(KeyError, TypeError, ValueError, ArithmeticError):
        values.decode(answer, refuse)


def test_values_of_own_classes_lose_their_methods():
    class Number(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class Text(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    class Items(list):  # type: ignore[type-arg]
        def __eq__(self, other: object) -> bool:
            return True

    for value in (Number(7), Text("x"), Items([1]), [Number(1)], {Text("a"): Number(2)}):
        decoded = values.decode(values.encode(value, refuse), refuse)
        assert decoded != "something else"
    assert values.decode(values.encode(range(3), refuse), refuse) == [0, 1, 2]
    assert list(values.decode(values.encode(iter("ab"), refuse), refuse)) == ["a", "b"]
    assert math.isnan(values.decode(values.encode(float("nan"), refuse), refuse))
    assert values.decode(values.encode(Fraction(1, 3), refuse), refuse) == Fraction(1, 3)
    assert values.decode(values.encode(Decimal("1.10"), refuse), refuse) == Decimal("1.10")
    with pytest.raises(TypeError):
        values.encode(object(), refuse)


def test_free_names_are_those_of_the_program():
    code = "import math\nk = 1\ndef check(c):\n    local = f(k)\n    assert g(math.pi) == len([h(x) for x in y])"
    assert free_names(code) == {"f", "g", "h", "y"}
    assert free_names("assert sorted(f(1)) == abs(2)") == {"f"}
    assert free_names("x = (") == set()


ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026


def decide(machine: str, number: int, argument: int = 0, audit: int | None = None) -> int:
    """Interpret the filter for one system call."""
    program = seccomp.make_filter(machine)
    lines = [struct.unpack_from("=HBBI", program, 8 * place) for place in range(len(program) // 8)]
    words = {0: number, 4: seccomp._AUDIT[machine] if audit is None else audit, 16: argument}
    value = place = 0
    while True:
        code, if_true, if_false, constant = lines[place]
        if code == 0x06:
            return int(constant)
        if code == 0x20:
            value = words[constant]
            place += 1
            continue
        holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
        place += 1 + (if_true if holds else if_false)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_what_it_should(machine: str):
    for number in seccomp._CALLS[machine].values():
        assert decide(machine, number) == EPERM
    read, openat = {"x86_64": (0, 257), "aarch64": (63, 56)}[machine]
    assert decide(machine, read) == decide(machine, openat) == ALLOW
    clone, socket = seccomp._CLONE[machine], seccomp._SOCKET[machine]
    assert decide(machine, clone, 17) == ALLOW
    assert decide(machine, clone, 0x003D0F00) == ALLOW  # a thread
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, clone, flag | 17) == EPERM
    assert decide(machine, 435) == ENOSYS
    assert [family for family in range(50) if decide(machine, socket, family) == ALLOW] == [1, 2, 10]
    assert decide(machine, read, audit=0x40000003) == 0x80000000
    if machine == "x86_64":
        assert decide(machine, 0x40000000) == EPERM
