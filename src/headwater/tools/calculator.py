"""``calculator``: exact arithmetic. It walks the expression's syntax tree and never evaluates it as code."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Any

from headwater.config.constraints import Within
from headwater.tools import TOOLS
from headwater.tools.base import BaseTool, ToolResponse

Number = Fraction | float

_MAX_CHARACTERS = 1000
_MAX_COUNT = 10_000
"""Largest argument of factorial, comb and perm."""
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "π": "pi"})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@TOOLS.register
class Calculator(BaseTool):
    """Evaluates an expression. Fractions and integers are exact; results have at most ``max_digits`` digits."""

    tool_schema = {  # noqa: RUF012 - the schema of the class
        "name": "calculator",
        "description": "Evaluate an arithmetic expression exactly and return its value.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "For example '(3 + 4) * 2 ** 5 / 7', 'sqrt(2)' or 'gcd(12, 18)'.",
                }
            },
            "required": ["expression"],
        },
    }

    def __init__(self, *, max_digits: Annotated[int, Within(10, 4000)] = 1000, tool_schema: Any = None) -> None:
        super().__init__(tool_schema=tool_schema)
        self._evaluate = _Evaluation(max_digits)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        try:
            return ToolResponse(self._evaluate.text(str(parameters["expression"])))
        except CannotCalculate as error:
            return ToolResponse(f"Error: {error}", metrics={"errors": 1.0})


class CannotCalculate(Exception):
    """The expression has no value, or one that is too large. The text is for the model."""


class _Evaluation:
    def __init__(self, max_digits: int) -> None:
        self._max_bits = math.ceil(max_digits * math.log2(10))
        self._max_digits = max_digits

    def text(self, expression: str) -> str:
        try:
            return _shown(self._value(_parse(expression)))
        except ZeroDivisionError:
            raise CannotCalculate("division by zero") from None
        except (OverflowError, RecursionError):
            raise CannotCalculate(f"the numbers are too large (more than {self._max_digits} digits)") from None
        except (ValueError, TypeError) as error:
            raise CannotCalculate(str(error)) from None

    def _value(self, node: ast.expr) -> Number:
        value = self._node(node)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise CannotCalculate("the result is not a finite number")
        elif max(value.numerator.bit_length(), value.denominator.bit_length()) > self._max_bits:
            raise OverflowError
        return value

    def _node(self, node: ast.expr) -> Number:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            return _literal(node.value)
        if isinstance(node, ast.Name) and node.id in _CONSTANTS:
            return _CONSTANTS[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
            value = self._value(node.operand)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left), self._value(node.right)
            if isinstance(node.op, ast.Pow):
                return self._power(left, right)
            if type(node.op) in _OPERATIONS:
                return _OPERATIONS[type(node.op)](left, right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            function = _FUNCTIONS.get(node.func.id)
            if function is None:
                raise CannotCalculate(f"unknown function {node.func.id}; known: {', '.join(_FUNCTIONS)}")
            return _call(node.func.id, function, [self._value(each) for each in node.args])
        raise CannotCalculate(f"{ast.unparse(node)[:40]!r} is not arithmetic")

    def _power(self, base: Number, exponent: Number) -> Number:
        if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            # 0, 1 and -1 have powers of any size; for others the number of bits grows with the exponent.
            if abs(base) not in (0, 1) and (bits - 1) * abs(exponent) > self._max_bits:
                raise OverflowError
            if abs(base) == 1:
                return base if exponent.numerator % 2 else Fraction(1)
            return Fraction(base ** int(exponent))
        result: float | complex = float(base) ** float(exponent)
        if isinstance(result, complex):
            raise CannotCalculate("the result is not a real number")
        return result


def _parse(expression: str) -> ast.expr:
    if len(expression) > _MAX_CHARACTERS:
        raise CannotCalculate(f"the expression has more than {_MAX_CHARACTERS} characters")
    text = expression.translate(_SIGNS).replace("^", "**").strip().rstrip("=").strip()
    if not any(character.isalpha() for character in text):
        text = _THOUSANDS.sub("", text)  # between letters, a comma separates the arguments of a function
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # such as for 1or 2; the tree is refused anyway
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise CannotCalculate("this is not an arithmetic expression") from None


def _literal(value: int | float) -> Number:
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    return Fraction(repr(value))  # 0.1 is exactly one tenth


def _call(name: str, function: Callable[..., Any], arguments: list[Number]) -> Number:
    try:
        result = function(*arguments)
    except TypeError:
        raise CannotCalculate(f"{name} cannot take {len(arguments)} arguments") from None
    return result if isinstance(result, float) else Fraction(result)


def _shown(value: Number) -> str:
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if value.denominator == 1:
        return str(value.numerator)
    # A denominator of only twos and fives has an exact decimal expansion.
    rest, digits = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        digits = max(digits, count)
    if rest == 1 and digits <= 15:
        whole = f"{abs(value.numerator) * 10**digits // value.denominator:0{digits + 1}d}"
        return f"{'-' if value < 0 else ''}{whole[:-digits]}.{whole[-digits:]}"
    return repr(float(value))


def _whole(value: Number, name: str, largest: int | None = None) -> int:
    whole = int(value)
    if value != whole:
        raise ValueError(f"{name} needs whole numbers")
    if largest is not None and abs(whole) > largest:
        raise ValueError(f"{name} needs numbers up to {largest}")
    return whole


def _sqrt(value: Number) -> Number:
    if value < 0:
        raise ValueError("the square root of a negative number is not a real number")
    if isinstance(value, Fraction):
        roots = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if roots[0] ** 2 == value.numerator and roots[1] ** 2 == value.denominator:
            return Fraction(*roots)
    return math.sqrt(value)


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    return round(Fraction(value), _whole(digits, "round", 100))


def _log(value: Number, base: Number | None = None) -> float:
    return math.log(value) if base is None else math.log(value) / math.log(base)


def _of_integers(name: str, function: Callable[..., int], largest: int | None = None) -> Callable[..., Number]:
    return lambda *values: Fraction(function(*(_whole(each, name, largest) for each in values)))


_CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: lambda a, b: a % b,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "min": lambda first, *rest: min((first, *rest)),
    "max": lambda first, *rest: max((first, *rest)),
    "sum": lambda *values: sum(values),
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": _sqrt,
    "exp": math.exp,
    "log": _log,
    "ln": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "gcd": _of_integers("gcd", math.gcd),
    "lcm": _of_integers("lcm", math.lcm),
    "factorial": _of_integers("factorial", math.factorial, _MAX_COUNT),
    "comb": _of_integers("comb", math.comb, _MAX_COUNT),
    "perm": _of_integers("perm", math.perm, _MAX_COUNT),
}
