"""Reach a target number from given numbers, each used exactly once."""

from __future__ import annotations

import random

from headwater.data.tasks import TASKS, Split, TaskRow, make_row, split_of, stable_hash, too_few_problems, whole_number

NAME = "countdown"
MIN_VAIN_DRAWS, VAIN_DRAWS_PER_FOUND = 5_000, 10
"""Draws without a new problem after which the space counts as exhausted; finding the last problem takes far fewer."""

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
) -> list[TaskRow]:
    """``num_rows`` different problems, each generated from an expression that solves it."""
    whole_number(NAME, "num_numbers", num_numbers, 2)
    whole_number(NAME, "max_number", max_number, 1)
    whole_number(NAME, "max_target", max_target, 1)
    # Python's generator: numpy's is ten times slower at drawing single numbers.
    generator = random.Random(stable_hash(f"{NAME}\n{split}\n{seed}"))
    solutions: dict[tuple[tuple[int, ...], int], str] = {}
    num_since_new = 0
    while len(solutions) < num_rows:
        if num_since_new > MIN_VAIN_DRAWS + VAIN_DRAWS_PER_FOUND * len(solutions):
            found = f"after {num_since_new} draws without a new problem, there seem to be only"
            remedy = "raise data.task_args.max_number, num_numbers or max_target"
            raise too_few_problems(NAME, split, num_rows, len(solutions), found, remedy)
        num_since_new += 1
        numbers = tuple(generator.randint(1, max_number) for _ in range(num_numbers))
        target, expression = _random_expression(numbers, generator)
        # The order of the numbers does not make a new problem.
        problem = (tuple(sorted(numbers)), target)
        if target <= max_target and problem not in solutions and split_of(NAME, repr(problem)) == split:
            solutions[problem] = expression
            num_since_new = 0
    return [
        _row(split, index, numbers, target, expression)
        for index, ((numbers, target), expression) in enumerate(solutions.items())
    ]


def _row(split: Split, index: int, numbers: tuple[int, ...], target: int, expression: str) -> TaskRow:
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


def _random_expression(numbers: tuple[int, ...], generator: random.Random) -> _Value:
    """Combine two random values at a time until one is left. Every intermediate value is a positive integer."""
    values: list[_Value] = [(number, str(number)) for number in numbers]
    while len(values) > 1:
        left = values.pop(generator.randrange(len(values)))
        right = values.pop(generator.randrange(len(values)))
        values.append(generator.choice(_joined(left, right)))
    value, expression = values[0]
    return value, _without_outer_parentheses(expression)


def _joined(left: _Value, right: _Value) -> list[_Value]:
    (a, a_text), (b, b_text) = max(left, right), min(left, right)
    choices = [(a + b, f"({a_text} + {b_text})"), (a * b, f"({a_text} * {b_text})")]
    if a > b:
        choices.append((a - b, f"({a_text} - {b_text})"))
    if a % b == 0:
        choices.append((a // b, f"({a_text} / {b_text})"))
    return choices


def _without_outer_parentheses(expression: str) -> str:
    # Every join adds one pair around the whole expression, so the first and last parenthesis always match.
    return expression[1:-1] if expression.startswith("(") else expression
