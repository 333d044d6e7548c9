"""GSM8K: grade-school maths word problems, from the published files (MIT licence)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headwater.core.errors import DataError
from headwater.data.row_store import JsonlRows
from headwater.data.tasks import TASKS, Split, TaskRow, make_row, task_generator, too_few_problems

NAME = "gsm8k"
FILES: dict[Split, str] = {"train": "train.jsonl", "eval": "test.jsonl"}
WHERE_TO_GET = (
    "train.jsonl and test.jsonl are in grade_school_math/data of https://github.com/openai/grade-school-math; "
    "put both in one folder and set data.task_args.folder to it"
)

_CALCULATOR_MARK = re.compile(r"<<.*?>>")


@TASKS.register
def gsm8k(split: Split, num_rows: int, seed: int, *, folder: str = "") -> list[TaskRow]:
    """``num_rows`` rows of the published split, chosen by ``seed``, in file order. Eval reads ``test.jsonl``."""
    path = _file(folder, split)
    published = JsonlRows(path, name=NAME)
    if len(published) < num_rows:
        remedy = "add rows to the file"
        raise too_few_problems(NAME, split, num_rows, len(published), f"{path} holds only", remedy)
    chosen = task_generator(NAME, split, seed).permutation(len(published))[:num_rows]
    return [_row(published, index, split) for index in sorted(chosen.tolist())]


def _file(folder: Any, split: Split) -> Path:
    if not folder or not isinstance(folder, str):
        raise DataError(f"task {NAME}: data.task_args.folder = {folder!r}: must name a folder; {WHERE_TO_GET}")
    path = Path(folder).expanduser() / FILES[split]
    if not path.is_file():
        raise DataError(f"task {NAME}: data.task_args.folder = {folder!r}: {path} does not exist; {WHERE_TO_GET}")
    return path


def _row(published: JsonlRows, index: int, split: Split) -> TaskRow:
    row, place = published[index], published.place(index)
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or "####" not in answer:
        raise DataError(f"{place}: not a GSM8K row: 'question' and an 'answer' with '####' are needed; {WHERE_TO_GET}")
    return make_row(
        f'{question.strip()}\nReason step by step, then write the final answer after "####".',
        data_source=NAME,
        ground_truth=answer.rpartition("####")[2].strip().replace(",", ""),
        split=split,
        index=index,
        demonstration=_CALCULATOR_MARK.sub("", answer),
    )
