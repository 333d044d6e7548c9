"""HumanEval: Python functions to complete, from the published file (MIT licence). For evaluation only."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from headwater.core.errors import DataError
from headwater.data.tasks import TASKS, Split, TaskRow, make_row, task_generator, too_few_problems

NAME = "humaneval"
FILES = ("HumanEval.jsonl.gz", "HumanEval.jsonl")
COLUMNS = ("prompt", "test", "entry_point", "canonical_solution")
WHERE_TO_GET = (
    "HumanEval.jsonl.gz is in data of https://github.com/openai/human-eval; set data.task_args.folder to its folder"
)


@TASKS.register
def humaneval(split: Split, num_rows: int, seed: int, *, folder: str = "") -> list[TaskRow]:
    """``num_rows`` of the 164 problems, chosen by ``seed``, in file order. The scorer ``code`` runs their tests."""
    if split == "train":
        raise DataError(f"task {NAME}: has no problems for training; use it in data.eval only")
    problems = _read(folder)
    if len(problems) < num_rows:
        raise too_few_problems(NAME, split, num_rows, len(problems), "the file holds only", "add rows to the file")
    chosen = task_generator(NAME, split, seed).permutation(len(problems))[:num_rows]
    return [_row(problems[index], index, split) for index in sorted(chosen.tolist())]


def _read(folder: Any) -> list[dict[str, Any]]:
    if not folder or not isinstance(folder, str):
        raise DataError(f"task {NAME}: data.task_args.folder = {folder!r}: must name a folder; {WHERE_TO_GET}")
    path = next((path for name in FILES if (path := Path(folder).expanduser() / name).is_file()), None)
    if path is None:
        raise DataError(f"task {NAME}: data.task_args.folder = {folder!r}: has no {FILES[0]}; {WHERE_TO_GET}")
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; {WHERE_TO_GET}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or any(not isinstance(row.get(column), str) for column in COLUMNS):
            raise DataError(f"{path}:{number}: not a HumanEval row: it needs {', '.join(COLUMNS)}; {WHERE_TO_GET}")
    return rows


def _row(problem: dict[str, Any], index: int, split: Split) -> TaskRow:
    return make_row(
        "Complete this Python function. Answer with the whole function in a ```python block.\n\n"
        f"```python\n{problem['prompt'].rstrip()}\n```",
        data_source=NAME,
        ground_truth={name: problem[name] for name in ("prompt", "test", "entry_point")},
        split=split,
        index=index,
        demonstration=f"```python\n{problem['prompt']}{problem['canonical_solution'].rstrip()}\n```",
    )
