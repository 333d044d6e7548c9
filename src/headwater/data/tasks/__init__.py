"""Tasks: functions that generate rows. A task is a file in this folder, or any function named by a dotted path:

    @TASKS.register
    def arithmetic(split: Split, num_rows: int, seed: int, *, max_operand: int = 99) -> list[TaskRow]: ...

The keyword parameters are its options (``data.task_args``). A parameter called ``argument`` receives the text after the
colon in ``reasoning_gym:chain_sum``. Problems of the eval split must not occur in the train split, for any seeds:
``split_of`` assigns each problem to one of the two.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from headwater.core.errors import DataError
from headwater.core.registry import Registry, nearest

Split = Literal["train", "eval"]
TaskRow = dict[str, Any]
Task = Callable[..., list[TaskRow]]

TASKS = Registry("task", "headwater.data.tasks")

HELD_OUT_ONE_IN = 5
"""One problem in five is held out for evaluation."""


def stable_hash(text: str) -> int:
    """A 64-bit hash that is the same in every process and on every machine, unlike Python's ``hash``."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def split_of(task: str, problem: str) -> Split:
    """The split a problem belongs to. It depends only on the problem, so the splits never overlap."""
    return "eval" if stable_hash(f"{task}\n{problem}") % HELD_OUT_ONE_IN == 0 else "train"


def task_generator(task: str, split: Split, seed: int) -> np.random.Generator:
    """The random generator of a task, split and seed."""
    return np.random.Generator(np.random.PCG64([seed, stable_hash(f"{task}\n{split}")]))


def make_row(
    prompt: str,
    *,
    data_source: str,
    ground_truth: Any,
    split: Split,
    index: int,
    demonstration: str | None,
    **extra_info: Any,
) -> TaskRow:
    """A row in the layout of verl's data files."""
    shown = {} if demonstration is None else {"demonstration": demonstration}
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "data_source": data_source,
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split, **shown, **extra_info},
    }


def too_few_problems(task: str, split: Split, num_rows: int, num_found: int, found: str, remedy: str) -> DataError:
    key = f"data.num_{split}_rows"
    return DataError(
        f"task {task}: {key} = {num_rows}, but {found} {num_found} distinct {split} problems; "
        f"set {key} to at most {num_found}, or {remedy}"
    )


def whole_number(task: str, option: str, value: Any, minimum: int) -> int:
    """Check an option that must be an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise DataError(f"task {task}: data.task_args.{option} = {value!r}: must be a whole number >= {minimum}")
    return value


def one_of(task: str, option: str, value: Any, choices: tuple[str, ...]) -> str:
    """Check an option that must be one of ``choices``."""
    if value not in choices:
        raise DataError(f"task {task}: data.task_args.{option} = {value!r}: must be one of {', '.join(choices)}")
    return str(value)


def run_task(
    task: Task,
    label: str,
    *,
    split: Split,
    num_rows: int,
    seed: int,
    argument: str | None,
    options: Mapping[str, Any],
) -> list[TaskRow]:
    """Call a task. Its options are checked against its signature, and its result must be a list of rows."""
    arguments = dict(options)
    _check_options(task, label, argument, options)
    if argument is not None:
        arguments["argument"] = argument
    rows = task(split=split, num_rows=num_rows, seed=seed, **arguments)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(f"task {label}: returned {type(rows).__name__}; a task returns a list of dicts, one per row")
    return rows


def _check_options(task: Task, label: str, argument: str | None, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(task).parameters
    missing = [name for name in ("split", "num_rows", "seed") if name not in parameters]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if missing and not takes_any:
        raise DataError(
            f"task {label}: has no parameter {missing[0]!r}; a task takes split, num_rows, seed and options"
        )
    if argument is not None and "argument" not in parameters:
        raise DataError(
            f"data source {label!r}: this task takes nothing after the colon; write {label.split(':')[0]!r}"
        )
    if argument is None and "argument" in parameters and parameters["argument"].default is inspect.Parameter.empty:
        raise DataError(f"data source {label!r}: this task needs an argument; write '{label}:<argument>'")
    known = [name for name in parameters if name not in ("split", "num_rows", "seed", "argument")]
    unknown = [name for name in options if name not in known]
    if unknown and not takes_any:
        each = "; ".join(
            f"unknown option data.task_args.{name} = {options[name]!r}; {nearest(name, known)}" for name in unknown
        )
        raise DataError(
            f"task {label}: {each}; "
            f"with several tasks, set options for each task: data.task_args = {{{label}: {{...}}}}"
        )
