"""Products that are too large to compute in the head, for a model that may call a calculator: ``38 times 94?``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from headwater.data.tasks import (
    TASKS,
    Split,
    TaskRow,
    make_row,
    one_of,
    split_of,
    task_generator,
    too_few_problems,
    whole_number,
)

NAME = "calculator"
DEMONSTRATIONS = ("right", "any_operation")
OPERATIONS = ("+", "-", "*")
MAX_DRAWS_PER_ROW = 200


@TASKS.register
def calculator(
    split: Split, num_rows: int, seed: int, *, num_digits: int = 2, demonstrations: str = "right"
) -> list[TaskRow]:
    """``num_rows`` different products of two numbers with ``num_digits`` digits each.

    A demonstration calls the tool ``calculator`` and repeats its result. With ``demonstrations="any_operation"``, the
    operation of the call is random, and every second demonstration answers with a random number instead of a call. The
    warm start then shows only the format of calls and answers. That it pays to call the tool, and with which operation,
    must be learned from the reward.
    """
    whole_number(NAME, "num_digits", num_digits, 1)
    one_of(NAME, "demonstrations", demonstrations, DEMONSTRATIONS)
    generator = task_generator(NAME, split, seed)
    problems: dict[tuple[int, int], None] = {}
    for _ in range(MAX_DRAWS_PER_ROW * num_rows):
        if len(problems) == num_rows:
            break
        first, second = (int(each) for each in generator.integers(10 ** (num_digits - 1), 10**num_digits, size=2))
        # The same factors in the other order count as the same problem, so they stay in one split.
        if split_of(NAME, f"{min(first, second)}*{max(first, second)}") == split:
            problems[first, second] = None
    else:
        remedy = "raise data.task_args.num_digits"
        raise too_few_problems(NAME, split, num_rows, len(problems), "random draws found only", remedy)
    return [_row(problem, split, index, demonstrations, generator) for index, problem in enumerate(problems)]


def _row(
    problem: tuple[int, int], split: Split, index: int, demonstrations: str, generator: np.random.Generator
) -> TaskRow:
    first, second = problem
    row = make_row(
        f"{first} times {second}?",
        data_source="exact_match",
        ground_truth=str(first * second),
        split=split,
        index=index,
        demonstration=None,
    )
    shown: Any = _call(first, "*", second)
    if demonstrations == "any_operation":
        is_guess, operation = generator.random() < 0.5, str(generator.choice(OPERATIONS))
        guess = str(generator.integers(first * second // 2, 2 * first * second))
        shown = [{"role": "assistant", "content": guess}] if is_guess else _call(first, operation, second)
    row["extra_info"]["demonstration"] = shown
    return row


def _call(first: int, operation: str, second: int) -> list[dict[str, str]]:
    """The messages of a call and of an answer that repeats its result."""
    arguments = {"expression": f"{first}{operation}{second}"}
    result = str({"+": first + second, "-": first - second, "*": first * second}[operation])
    return [
        {
            "role": "assistant",
            "content": f"<tool_call>{json.dumps({'name': NAME, 'arguments': arguments})}</tool_call>",
        },
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]
