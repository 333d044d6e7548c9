"""Sums, differences and products of whole numbers: ``12+34=``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.core.errors import DataError
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

NAME = "arithmetic"
OPERATIONS = ("+", "-", "*")
STYLES = ("plain", "words")

ENUMERATE_FACTOR = 40
"""A problem space of up to this many times the requested rows is enumerated. In a larger one, draws rarely repeat."""


@TASKS.register
def arithmetic(
    split: Split,
    num_rows: int,
    seed: int,
    *,
    min_operand: int = 0,
    max_operand: int = 99,
    operations: Sequence[str] = ("+",),
    num_operands: int = 2,
    style: str = "plain",
) -> list[TaskRow]:
    """``num_rows`` different problems. ``style`` plain asks ``12+34=``; words asks ``What is 12 + 34?``."""
    one_of(NAME, "style", style, STYLES)
    space = _Space(
        low=whole_number(NAME, "min_operand", min_operand, 0),
        high=whole_number(NAME, "max_operand", max_operand, min_operand),
        operations=_checked_operations(operations),
        num_operands=whole_number(NAME, "num_operands", num_operands, 2),
    )
    rows = []
    for index, problem in enumerate(_choose(space, split, num_rows, seed)):
        answer = str(problem.answer)
        rows.append(
            make_row(
                problem.plain + "=" if style == "plain" else f"What is {problem.spaced}?",
                data_source=NAME,
                ground_truth=answer,
                split=split,
                index=index,
                demonstration=answer,
            )
        )
    return rows


@dataclass(frozen=True)
class _Problem:
    operands: tuple[int, ...]
    operations: tuple[str, ...]

    @property
    def plain(self) -> str:
        return self.spaced.replace(" ", "")

    @property
    def spaced(self) -> str:
        pairs = zip(self.operations, self.operands[1:], strict=True)
        return " ".join([str(self.operands[0]), *(f"{operation} {operand}" for operation, operand in pairs)])

    @property
    def split(self) -> Split:
        """34+12 is in the same split as 12+34; otherwise held-out sums would occur in the train split, reversed."""
        commutes = set(self.operations) in ({"+"}, {"*"})
        operands = tuple(sorted(self.operands)) if commutes else self.operands
        return split_of(NAME, _Problem(operands, self.operations).plain)

    @property
    def answer(self) -> int:
        total, sign, product = 0, 1, self.operands[0]
        for operation, operand in zip(self.operations, self.operands[1:], strict=True):
            if operation == "*":
                product *= operand
            else:
                total += sign * product
                sign, product = (1 if operation == "+" else -1), operand
        return total + sign * product


@dataclass(frozen=True)
class _Space:
    low: int
    high: int
    operations: tuple[str, ...]
    num_operands: int

    @property
    def size(self) -> int:
        return math.prod([self.high - self.low + 1] * self.num_operands + [len(self.operations)] * self.num_operations)

    @property
    def num_operations(self) -> int:
        return self.num_operands - 1

    def all(self) -> Iterator[_Problem]:
        for operands in itertools.product(range(self.low, self.high + 1), repeat=self.num_operands):
            for operations in itertools.product(self.operations, repeat=self.num_operations):
                yield _Problem(operands, operations)

    def draw(self, generator: np.random.Generator) -> _Problem:
        operands = generator.integers(self.low, self.high, size=self.num_operands, endpoint=True).tolist()
        choices = generator.integers(0, len(self.operations), size=self.num_operations).tolist()
        return _Problem(tuple(operands), tuple(self.operations[choice] for choice in choices))


def _choose(space: _Space, split: Split, num_rows: int, seed: int) -> list[_Problem]:
    generator = task_generator(NAME, split, seed)
    if space.size <= ENUMERATE_FACTOR * num_rows:
        problems = [problem for problem in space.all() if problem.split == split]
        if len(problems) < num_rows:
            remedy = "raise data.task_args.max_operand or num_operands"
            raise too_few_problems(NAME, split, num_rows, len(problems), "there are only", remedy)
        return [problems[position] for position in generator.permutation(len(problems))[:num_rows]]
    chosen: dict[_Problem, None] = {}
    while len(chosen) < num_rows:
        problem = space.draw(generator)
        if problem.split == split:
            chosen.setdefault(problem)
    return list(chosen)


def _checked_operations(operations: Any) -> tuple[str, ...]:
    chosen = tuple(operations) if isinstance(operations, Sequence) else ()
    if not chosen or any(operation not in OPERATIONS for operation in chosen) or len(set(chosen)) < len(chosen):
        raise DataError(
            f"task {NAME}: data.task_args.operations = {operations!r}: must be different ones of + - *, "
            "for example ['+', '-']"
        )
    return chosen
