"""Products that are too large to compute in the head, for a model that may call a calculator: ``38 times 94?``."""

from __future__ import annotations

import json
import math

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
DEMONSTRATIONS = ("right", "any_factor")
GUESSED_SHARE = 0.25
MAX_DRAWS_PER_ROW = 200


@TASKS.register
def calculator(
    split: Split, num_rows: int, seed: int, *, num_digits: int = 2, demonstrations: str = "right"
) -> list[TaskRow]:
    """``num_rows`` different products of two numbers with ``num_digits`` digits each.

    A demonstration calls the tool ``calculator`` and repeats its result. With ``demonstrations="any_factor"``, every
    second call multiplies the first number by itself, and one demonstration in four answers with a random number
    instead of a call. The warm start then shows only the format of calls and answers. That it pays to call the tool,
    and with what, must be learned from the reward.
    """
    whole_number(NAME, "num_digits", num_digits, 1)
    one_of(NAME, "demonstrations", demonstrations, DEMONSTRATIONS)
    generator = task_generator(NAME, split, seed)
    # All products have the same number of digits, which is easier to learn.
    low, high = math.isqrt(10 ** (2 * num_digits - 1)) + 1, 10**num_digits
    problems: dict[tuple[int, int], None] = {}
    for _ in range(MAX_DRAWS_PER_ROW * num_rows):
        if len(problems) == num_rows:
            break
        first, second = (int(each) for each in generator.integers(low, high, size=2))
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
    shown = _call(first, second)
    if demonstrations == "any_factor":
        is_guess = generator.random() < GUESSED_SHARE
        factor = int(generator.choice([first, second]))
        guess = "".join(map(str, generator.integers(1, 10, size=len(str(first * second)))))
        shown = [{"role": "assistant", "content": guess}] if is_guess else _call(first, factor)
    row["extra_info"]["demonstration"] = shown
    return row


def _call(first: int, second: int) -> list[dict[str, str]]:
    """The messages of a call and of an answer that repeats its result."""
    arguments = {"expression": f"{first}*{second}"}
    result = str(first * second)
    return [
        {
            "role": "assistant",
            "content": f"<tool_call>{json.dumps({'name': NAME, 'arguments': arguments})}</tool_call>",
        },
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]
