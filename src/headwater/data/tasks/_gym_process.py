"""The child process of the ``reasoning_gym`` task: reads a JSON request from stdin, writes JSON entries to stdout."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from typing import Any

from headwater.core.errors import DataError
from headwater.core.registry import nearest
from headwater.data.json_safe import to_json_safe
from headwater.data.tasks import Split, split_of, stable_hash

CHUNK_ROWS = 500
"""Problems per gym dataset: the default size, which every dataset accepts."""
ENTRY_KEYS = ("question", "answer", "metadata")
MIN_DRAWS, DRAWS_PER_ROW = 4_000, 40
RESERVED = {"size": "data.num_train_rows and data.num_eval_rows", "seed": "run.seed"}


def generate(dataset: str, split: Split, num_rows: int, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Up to ``num_rows`` entries with different questions, and the number of draws."""
    first_seed = stable_hash(f"{dataset}\n{seed}") % 2**31
    max_draws = max(MIN_DRAWS, DRAWS_PER_ROW * num_rows)
    entries: dict[str, dict[str, Any]] = {}
    num_draws = 0
    while len(entries) < num_rows and num_draws < max_draws:
        # Entry i of a gym dataset is generated from seed + i, so consecutive chunks never overlap.
        chunk = _create(dataset, (first_seed + num_draws) % 2**32, options)
        for index in range(CHUNK_ROWS):
            entry = chunk[index]
            num_draws += 1
            if split_of(dataset, entry["question"]) == split:
                entries.setdefault(entry["question"], {key: to_json_safe(entry[key]) for key in ENTRY_KEYS})
            if len(entries) == num_rows:
                break
    return {"entries": list(entries.values()), "num_draws": num_draws}


def _create(dataset: str, seed: int, options: dict[str, Any]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, sorted(DATASETS), n=5, cutoff=0.4) or sorted(DATASETS)
        raise DataError(f"the gym has no dataset {dataset!r}; nearest of its {len(DATASETS)}: {', '.join(near)}")
    known = [field.name for field in dataclasses.fields(DATASETS[dataset][1])]
    for name, value in options.items():
        if name in RESERVED:
            raise DataError(f"data.task_args.{name} = {value!r}: is set by {RESERVED[name]}; leave it out")
        if name not in known:
            raise DataError(f"unknown option data.task_args.{name} = {value!r}; {nearest(name, known)}")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=CHUNK_ROWS, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"data.task_args = {options!r}: {error or type(error).__name__}") from error


def main() -> None:
    # Some gym datasets print while they generate. Their output goes to stderr, so stdout holds only the answer.
    answer_stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer = generate(**json.load(sys.stdin))
    except DataError as error:
        answer = {"error": str(error)}
    with answer_stream:
        json.dump(answer, answer_stream)


if __name__ == "__main__":
    main()
