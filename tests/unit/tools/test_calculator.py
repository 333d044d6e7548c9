"""The calculator is exact, bounded, and evaluates no code."""

from __future__ import annotations

import contextlib
import re
import time
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from tools.boxes import ask, call, toolbox

from headwater.tools.calculator import CannotCalculate, _Evaluation

VALUES = {
    "1 + 2 * 3": "7",
    "(1 + 2) * 3": "9",
    "0.1 + 0.2": "0.3",
    "1/3": "0.3333333333333333",
    "1/3 * 3": "1",
    "-1/8": "-0.125",
    "2 ^ 10": "1024",
    "2**-2": "0.25",
    "-7 // 2": "-4",
    "-7 % 3": "2",
    "7 % -3": "-2",
    "1,234,567 + 1": "1234568",
    "6 × 7 ÷ 2 − 1": "20",
    "3 * 4 =": "12",
    "sqrt(16/9) * 3": "4",
    "sqrt(2)": "1.4142135623730951",
    "round(2.5)": "2",
    "round(3.14159, 2)": "3.14",
    "max(1, 5, 3) - min(4, 2)": "3",
    "gcd(12, 18) + lcm(4, 6)": "18",
    "factorial(20)": "2432902008176640000",
    "comb(5, 2)": "10",
    "2 * pi": "6.283185307179586",
    "abs(-5) + floor(2.7) + ceil(2.1)": "10",
    "10 ** 30 + 1": "1000000000000000000000000000001",
    "1 ** 10 ** 900": "1",
    "log(8, 2)": "3",
    "1e3": "1000",
}
ERRORS = {
    "1 / 0": "division by zero",
    "0 ** -1": "division by zero",
    "9 ** 9 ** 9": "too large",
    "10 ** 2000": "too large",
    "factorial(5000)": "too large",
    "factorial(10 ** 6)": "up to",
    "exp(10 ** 5)": "too large",
    "1e999": "too large",
    "(-8) ** (1/3)": "not a real number",
    "sqrt(-1)": "not a real number",
    "log(0)": "math",
    "__import__('os').system('true')": "is not arithmetic",
    "open('x')": "unknown function open",
    "(1).__class__": "is not arithmetic",
    "[1, 2][0]": "is not arithmetic",
    "x + 1": "is not arithmetic",
    "'a' * 10": "is not arithmetic",
    "True + 1": "is not arithmetic",
    "1 if 1 else 2": "is not arithmetic",
    "lambda: 1": "is not arithmetic",
    "gcd(1.5, 2)": "whole numbers",
    "sqrt()": "cannot take 0 arguments",
    "min()": "cannot take 0 arguments",
    "sqrt(x=4)": "is not arithmetic",
    "1 +": "not an arithmetic expression",
    "": "not an arithmetic expression",
    "(" * 400 + "1" + ")" * 400: "not an arithmetic expression",
    "1" * 1001: "more than 1000 characters",
    "\x00": "not an arithmetic expression",
}


def test_values_and_errors():
    results = ask(toolbox(use=("calculator",)), *(call("calculator", expression=each) for each in [*VALUES, *ERRORS]))
    assert [each.text for each in results[: len(VALUES)]] == list(VALUES.values())
    for result, expected in zip(results[len(VALUES) :], ERRORS.values(), strict=True):
        assert result.text.startswith("Error: ")
        assert expected in result.text
        assert result.metrics == {"errors": 1.0}
        assert result.failure is None  # the model made a mistake, not the tool


numbers = st.integers(-999, 999).map(str) | st.decimals(-99, 99, places=2).map(str)
expressions = st.recursive(
    numbers.map(lambda each: f"({each})"),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=12,
)


@given(expressions)
def test_arithmetic_is_exact(expression):
    exact = re_evaluated(expression)
    try:
        text = _Evaluation(1000).text(expression)
    except CannotCalculate:
        assert exact is None
        return
    assert exact is not None
    assert abs(Fraction(text) - exact) <= abs(exact) * Fraction(1, 10**15)
    if exact.denominator == 1:
        assert text == str(exact.numerator)


def re_evaluated(expression: str) -> Fraction | None:
    """The value by Python itself, with fractions in place of numbers."""
    source = re.sub(r"\d+(\.\d+)?", lambda match: f"Fraction('{match[0]}')", expression)
    try:
        value: Fraction = eval(source, {"Fraction": Fraction})
        return value
    except ZeroDivisionError:
        return None


@given(st.text("0123456789.+-*/^%()e, sqrtfacolgminxbp", max_size=60))
def test_any_text_has_a_value_or_an_error_soon(text):
    began = time.thread_time()
    with contextlib.suppress(CannotCalculate):
        assert _Evaluation(1000).text(text)
    assert time.thread_time() - began < 5
