"""An equation that reaches a target with each given number used once."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from headwater.config.traits import ScorerTraits
from headwater.rewards.answers import last_answer_tag
from headwater.rewards.scorers import SCORERS

_MAX_EXPRESSION_CHARACTERS = 200


@SCORERS.register(ScorerTraits(is_quick=True))
def countdown(
    data_source: str,
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extra_info: Mapping[str, Any],
    *,
    format_score: float = 0.1,
) -> dict[str, float]:
    """1.0 for a correct equation in the last <answer>, ``format_score`` for a well-formed but wrong one, else 0.0."""
    answer = last_answer_tag(solution_str)
    parsed = _evaluate(answer.partition("=")[0].strip()) if answer is not None else None
    if parsed is None:
        return {"score": 0.0, "well_formed": 0.0}
    value, numbers = parsed
    right = value == Fraction(ground_truth["target"]) and Counter(numbers) == Counter(
        int(number) for number in ground_truth["numbers"]
    )
    return {"score": 1.0 if right else format_score, "well_formed": 1.0}


def _evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression of integers and + - * /, and the integers in it. None for any other text."""
    if len(expression) > _MAX_EXPRESSION_CHARACTERS:
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
        numbers: list[int] = []
        return _value(tree, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
    raise ValueError(f"not an arithmetic expression: {ast.dump(node)}")
