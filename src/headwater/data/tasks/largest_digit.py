"""The largest digit of a number: ``Largest of 37152?``. The quickstart's task."""

from __future__ import annotations

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

NAME = "largest_digit"
DEMONSTRATIONS = ("right", "any_digit")
MAX_DRAWS_PER_ROW = 200


@TASKS.register
def largest_digit(
    split: Split, num_rows: int, seed: int, *, num_digits: int = 5, demonstrations: str = "right"
) -> list[TaskRow]:
    """``num_rows`` different numbers with ``num_digits`` digits.

    With ``demonstrations="any_digit"`` the warm start demonstrates only the format of an answer, a random digit of the
    number. Which digit is right must be learned from the reward.
    """
    whole_number(NAME, "num_digits", num_digits, 2)
    one_of(NAME, "demonstrations", demonstrations, DEMONSTRATIONS)
    generator = task_generator(NAME, split, seed)
    numbers: dict[str, None] = {}
    for _ in range(MAX_DRAWS_PER_ROW * num_rows):
        if len(numbers) == num_rows:
            break
        number = "".join(map(str, generator.integers(0, 10, size=num_digits)))
        # The same digits in another order count as the same problem, so they stay in one split.
        if split_of(NAME, "".join(sorted(number))) == split:
            numbers[number] = None
    else:
        remedy = "raise data.task_args.num_digits"
        raise too_few_problems(NAME, split, num_rows, len(numbers), "random draws found only", remedy)
    return [_row(number, split, index, demonstrations, generator) for index, number in enumerate(numbers)]


def _row(number: str, split: Split, index: int, demonstrations: str, generator: np.random.Generator) -> TaskRow:
    largest = max(number)
    return make_row(
        f"Largest of {number}?",
        data_source=NAME,
        ground_truth=largest,
        split=split,
        index=index,
        demonstration=largest if demonstrations == "right" else str(generator.choice(list(number))),
    )
