"""Responses per second that the built-in scorers judge in reward workers: programs, mathematics, GSM8K.

python benchmarks/scorer_checks.py [--workers 2] [--runs 3]

Programs are the 164 canonical solutions of HumanEval with all their tests, and small programs that print. Mathematical
answers are compared symbolically; whole numbers need no such comparison.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import lzma
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from options import add_work, parser_of
from record import write_record

from headwater.config.rollout_schema import RewardConfig
from headwater.core.records import Answer, Prompt
from headwater.observe.spans import Spans
from headwater.rewards.managers.naive import NaiveRewardManager

DATA = Path(__file__).parents[1] / "tests" / "data"
MATHEMATICS = [(r"\frac{1}{2}", r"\frac{2}{4}"), ("x^2+2x+1", "(x+1)^2"), (r"2\sqrt{3}", r"\sqrt{12}"),
               (r"\{1,2,3\}", "3, 2, 1"), ("(1,2]", r"1 < x \le 2"), ("10", r"10\text{ cm}")]  # fmt: skip


def answer(data_source: str, text: str, ground_truth: object) -> Answer:
    return Answer(Prompt("row", (), "", (1,), data_source=data_source, ground_truth=ground_truth), text)


def humaneval() -> list[Answer]:
    with gzip.open(DATA / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    keys = ("prompt", "test", "entry_point")
    return [answer("humaneval", row["canonical_solution"], {key: row[key] for key in keys}) for row in rows]


def prints() -> list[Answer]:
    truth = {"inputs": ["3\n", "4\n"], "outputs": ["6\n", "8\n"]}
    return [answer("apps", f"print(2 * int(input()))  # {number}", truth) for number in range(100)]


def mathematics() -> list[Answer]:
    return [answer("lighteval/MATH", f"\\boxed{{{said}}}", truth) for truth, said in MATHEMATICS * 50]


def whole_numbers() -> list[Answer]:
    return [answer("aime_2024", f"Answer: {number}", str(number)) for number in range(1000)]


def gsm8k() -> list[Answer]:
    with lzma.open(DATA / "gsm8k_test_answers.jsonl.xz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line) for line in file]
    return [answer("openai/gsm8k", text, text.rpartition("####")[2].strip()) for text in texts]


def rate(manager: NaiveRewardManager, answers: Sequence[Answer]) -> tuple[float, float]:
    """Responses per second, and the share that scored 1.0."""

    async def score_all() -> list[float]:
        return [score.value for score in await asyncio.gather(*map(manager.score, answers))]

    began = time.perf_counter()
    values = asyncio.run(score_all())
    return len(answers) / (time.perf_counter() - began), sum(value == 1.0 for value in values) / len(values)


def main() -> None:
    parser = parser_of(__doc__)
    add_work(parser, runs=3)
    parser.add_argument("--workers", type=int, default=2, help="reward workers (default 2)")
    options = parser.parse_args()
    rows = []
    for make in (humaneval, prints, mathematics, whole_numbers, gsm8k):
        answers = make()
        with closing(NaiveRewardManager(RewardConfig(workers=options.workers), Spans())) as manager:
            rate(manager, answers[: 2 * options.workers])  # starts the workers and what they start
            runs = [rate(manager, answers) for _ in range(options.runs)]
        per_s = statistics.median(each for each, _ in runs)
        share = runs[-1][1]
        rows.append({"scorer": make.__name__, "responses": len(answers), "per_s": per_s, "right": share,
                     "runs": [each for each, _ in runs]})  # fmt: skip
        print(
            f"{make.__name__:>14}  {len(answers):>5} responses  {per_s:>9,.0f} per s  {runs[-1][1]:.1%} right",
            flush=True,
        )
    write_record(options.out, torch.device("cpu"), workers=options.workers, rows=rows)


if __name__ == "__main__":
    main()
