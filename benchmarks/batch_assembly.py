"""Host time that a training step spends on its batch besides the models: records, padding, staleness, rollout files.

    python benchmarks/batch_assembly.py [--rows 256] [--tokens 8192] [--out FILE]

The rows are random tokens in groups, sampled by two policy versions. Each part is what a run calls, in one of three
threads of its controller:

- ``records``, in the event loop of the rollouts: making the trajectories when episodes end, which checks them, and
  finding the oldest version of every group
- ``staleness``, in the main thread: removing the tokens of the older version from the loss
- ``padding``, in the main thread: one padded batch
- ``scores``, in the main thread: the columns of the rewards, as reward models and length penalties need them
- ``file``, in the thread that writes records: the rollout file (Parquet)

Only the main thread makes the learner's GPUs wait. The three share Python's interpreter lock, so their sum is a bound
as well. Times are the medians of several runs, in seconds of CPU time of all threads, so a busy machine changes them
little.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from options import parser_of
from record import write_record

from headwater.core.records import NOT_SAMPLED, Prompt, Trajectory
from headwater.rollout.group import Group, add_to_scores, pad_trajectories, score_columns
from headwater.trainer.tables import write_rollouts

VOCABULARY = 150_000
NUM_PROMPT_TOKENS = 256
GROUP_SIZE = 16
THREADS = {"rollouts": ("records",), "main": ("staleness", "padding", "scores"), "writer": ("file",)}


def fields_of(number: int, num_tokens: int) -> dict[str, object]:
    """Every number is its own Python object, as in a run."""
    source = random.Random(number)
    num_new = num_tokens - NUM_PROMPT_TOKENS
    old = source.randrange(1, num_new)
    return {
        "uid": f"row/{number // GROUP_SIZE}",
        "sample": number % GROUP_SIZE,
        "tokens": tuple(source.randrange(VOCABULARY) for _ in range(num_tokens)),
        "prompt_length": NUM_PROMPT_TOKENS,
        "loss_mask": (0,) * NUM_PROMPT_TOKENS + (1,) * num_new,
        "logprobs": (0.0,) * NUM_PROMPT_TOKENS + tuple(-source.random() for _ in range(num_new)),
        "versions": (NOT_SAMPLED,) * NUM_PROMPT_TOKENS + (3,) * old + (4,) * (num_new - old),
        "reward": 1.0,
        "stop_reason": "length",
        "info": {"response_text": "x" * 4 * num_new},
    }


def groups_of(trajectories: list[Trajectory]) -> list[Group]:
    starts = range(0, len(trajectories), GROUP_SIZE)
    return [
        Group(
            Prompt(trajectories[start].uid, (), "?", trajectories[start].tokens[:NUM_PROMPT_TOKENS], "none"),
            tuple(trajectories[start : start + GROUP_SIZE]),
        )
        for start in starts
    ]


def parts_of(fields: list[dict[str, object]], file: Path) -> dict[str, Callable[[], object]]:
    trajectories = [Trajectory(**each) for each in fields]  # type: ignore[arg-type]
    groups = groups_of(trajectories)
    padded = pad_trajectories(trajectories, 0).batch
    rewards, mask = torch.zeros_like(padded["response_mask"]), padded["response_mask"].numpy()
    rollouts = [(group.prompt, each) for group in groups for each in group.trajectories]

    def records() -> None:
        for group in groups_of([Trajectory(**each) for each in fields]):  # type: ignore[arg-type]
            assert group.oldest_version() == 3

    def staleness() -> None:
        for group in groups:
            group.without_older(4)

    return {
        "records": records,
        "staleness": staleness,
        "padding": lambda: pad_trajectories(trajectories, 0),
        "scores": lambda: add_to_scores(
            rewards, torch.ones(len(fields)), torch.from_numpy(score_columns(trajectories, mask))
        ),
        "file": lambda: write_rollouts(file, 1, rollouts),
    }


def seconds(part: Callable[[], object], num_runs: int) -> float:
    times = []
    for _ in range(num_runs):
        began = time.process_time()
        part()
        times.append(time.process_time() - began)
    return statistics.median(times)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=256, help="trajectories (default 256)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each, with its prompt (default 8192)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each part (default 3)")
    options = parser.parse_args()
    fields = [fields_of(number, options.tokens) for number in range(options.rows)]
    with tempfile.TemporaryDirectory() as folder:
        calls = parts_of(fields, Path(folder) / "rollouts.parquet")
        measured = {name: seconds(part, options.runs) for name, part in calls.items()}
    num_tokens = options.rows * options.tokens
    print(f"{options.rows} rows of {options.tokens} tokens, seconds of CPU time")
    for name, value in measured.items():
        print(f"{name:>10} {value:8.3f}")
    per_token = {thread: sum(measured[part] for part in parts) / num_tokens for thread, parts in THREADS.items()}
    for thread, value in per_token.items():
        print(f"{thread:>10} {1e6 * value:8.2f} µs per token")
    write_record(
        options.out, torch.device("cpu"), rows=options.rows, tokens=options.tokens, seconds=measured,
        seconds_per_token=per_token,
    )  # fmt: skip


if __name__ == "__main__":
    main()
