"""The generators of the ``reasoning-gym`` package, more than a hundred: ``reasoning_gym:chain_sum``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from headwater.core.errors import DataError
from headwater.data.json_safe import from_json_safe
from headwater.data.tasks import TASKS, Split, TaskRow, make_row, too_few_problems

NAME = "reasoning_gym"
TIME_LIMIT_S = 600


@TASKS.register
def reasoning_gym(split: Split, num_rows: int, seed: int, argument: str, **options: Any) -> list[TaskRow]:
    """``num_rows`` different problems of the gym's dataset ``argument``; ``options`` are that dataset's options."""
    label = f"{NAME}:{argument}"
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(f"task {label}: the package reasoning-gym is not installed; pip install headwater[tasks]")
    request = {"dataset": argument, "split": split, "num_rows": num_rows, "seed": seed, "options": options}
    entries, num_draws = _in_child_process(label, request)
    if len(entries) < num_rows:
        found, remedy = f"{num_draws} draws found only", "widen the task with data.task_args"
        raise too_few_problems(label, split, num_rows, len(entries), found, remedy)
    return [_row(label, split, index, argument, options, entry) for index, entry in enumerate(entries)]


def gym_entry(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """The gym's entry of a row, in the format that ``score_answer(answer, entry)`` expects:

    dataset = reasoning_gym.create_dataset(extra_info["gym"]["dataset"], **extra_info["gym"]["options"])
    dataset.score_answer("42", gym_entry(extra_info))
    """
    gym = extra_info["gym"]
    return {
        "question": gym["question"],
        "answer": from_json_safe(gym["answer"]),
        "metadata": from_json_safe(gym["metadata"]),
    }


def _row(
    label: str, split: Split, index: int, dataset: str, options: Mapping[str, Any], entry: dict[str, Any]
) -> TaskRow:
    answer = entry["answer"]
    return make_row(
        f"{entry['question']}\n\nPut the final answer between <answer> and </answer>.",
        data_source=label,
        ground_truth=answer,
        split=split,
        index=index,
        # Some datasets accept many answers and provide none.
        demonstration=f"<answer>{answer}</answer>" if isinstance(answer, str) else None,
        gym={"dataset": dataset, "options": dict(options), **entry},
    )


def _in_child_process(label: str, request: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Generate entries in a process with a fixed hash seed.

    Several gym datasets iterate over sets of strings, so their problems depend on Python's hash seed. With a fixed one,
    a resumed run generates the same rows.
    """
    try:
        payload = json.dumps(request)
    except TypeError as error:
        raise DataError(f"task {label}: data.task_args = {request['options']!r}: {error}; use plain values") from error
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "headwater.data.tasks._gym_process"]
    try:
        child = subprocess.run(
            command, input=payload, env=environment, capture_output=True, text=True, check=False, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"task {label}: no rows within {TIME_LIMIT_S} s; request fewer rows, or change data.task_args"
        ) from error
    if child.returncode != 0:
        raise DataError(f"task {label}: the gym failed:\n{child.stderr.strip()[-2000:]}")
    answer = json.loads(child.stdout)
    if "error" in answer:
        raise DataError(f"task {label}: {answer['error']}")
    return answer["entries"], answer["num_draws"]
