"""Reach a target number from given numbers, each used exactly once."""

from __future__ import annotations

import math

import numpy as np

from headwater.data.task import TASKS, Row, Split, make_row, split_of, task_generator, too_few_problems, whole_number

NAME = "countdown"

_Value = tuple[int, str]
"""A number and the expression that made it."""


@TASKS.register
def countdown(
    split: Split,
    num_rows: int,
    seed: int,
    *,
    num_numbers: int = 3,
    max_number: int = 20,
    max_target: int = 100,
) -> list[Row]:
    """``num_rows`` different problems, each made from an expression that solves it."""
    whole_number(NAME, "num_numbers", num_numbers, 2)
    whole_number(NAME, "max_number", max_number, 1)
    whole_number(NAME, "max_target", max_target, 1)
    generator = task_generator(NAME, split, seed)
    solutions: dict[tuple[tuple[int, ...], int], str] = {}
    num_draws = 10_000 + 200 * num_rows
    for _ in range(num_draws):
        if len(solutions) == num_rows:
            break
        numbers = tuple(generator.integers(1, max_number, size=num_numbers, endpoint=True).tolist())
        target, expression = _random_expression(numbers, generator)
        # The order of the numbers is no part of the problem: an order unseen in training would not be a new problem.
        problem = (tuple(sorted(numbers)), target)
        if 1 <= target <= max_target and split_of(NAME, repr(problem)) == split:
            solutions.setdefault(problem, expression)
    if len(solutions) < num_rows:
        found, remedy = (
            f"{num_draws} random draws found only",
            "raise data.task_args.max_number, num_numbers or max_target",
        )
        raise too_few_problems(NAME, split, num_rows, len(solutions), found, remedy)
    return [
        _row(split, index, numbers, target, expression)
        for index, ((numbers, target), expression) in enumerate(solutions.items())
    ]


def _row(split: Split, index: int, numbers: tuple[int, ...], target: int, expression: str) -> Row:
    prompt = (
        f"Using each of the numbers {', '.join(map(str, numbers))} exactly once, and any of + - * / and parentheses, "
        f"write an expression that equals {target}. "
        "Put the expression between <answer> and </answer>, for example <answer>(1 + 2) * 3</answer>."
    )
    return make_row(
        prompt,
        data_source=NAME,
        ground_truth={"target": target, "numbers": list(numbers)},
        split=split,
        index=index,
        demonstration=f"<answer>{expression}</answer>",
    )


def _random_expression(numbers: tuple[int, ...], generator: np.random.Generator) -> _Value:
    """Join two random values at a time until one is left; every intermediate value is a positive whole number."""
    values: list[_Value] = [(number, str(number)) for number in numbers]
    while len(values) > 1:
        first, second = sorted(generator.choice(len(values), size=2, replace=False).tolist())
        right, left = values.pop(second), values.pop(first)
        choices = _joined(left, right)
        values.append(choices[int(generator.integers(len(choices)))])
    value, expression = values[0]
    return value, _without_outer_parentheses(expression)


def _joined(left: _Value, right: _Value) -> list[_Value]:
    (a, a_text), (b, b_text) = max(left, right), min(left, right)
    choices = [(a + b, f"({a_text} + {b_text})"), (a * b, f"({a_text} * {b_text})")]
    if a > b:
        choices.append((a - b, f"({a_text} - {b_text})"))
    if math.gcd(a, b) == b:
        choices.append((a // b, f"({a_text} / {b_text})"))
    return choices


def _without_outer_parentheses(expression: str) -> str:
    # Every join writes one pair around its whole expression, so the outermost pair always matches itself.
    return expression[1:-1] if expression.startswith("(") else expression
