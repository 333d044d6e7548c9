"""Time what recording one step costs, beside the step itself.

    python benchmarks/metrics_overhead.py [--prompts 64] [--samples 16] [--tokens 256]

Makes a batch of that size, and measures in this process: the metrics of a step (``step_metrics``), the statistics of
advantages and returns, the comparison of log-probs, one look at memory for each stage, handing a record to trackers,
and, for comparison, writing the rollouts as Parquet. Times are medians.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from options import parser_of
from record import write_record

from headwater.algorithms.diagnostics import gap_metrics, gap_sums, token_statistics
from headwater.core.records import Prompt, Trajectory
from headwater.observe.trackers import Trackers
from headwater.rollout.group import Group, RolloutBatch
from headwater.rollout.ledger import LedgerCounts
from headwater.rollout.snapshot import Books, RolloutSnapshot
from headwater.trainer.metrics import RunFacts, StageMemory, step_metrics
from headwater.trainer.tables import write_rollouts

_REPEATS = 11
_STAGES = {"wait": 0.5, "experience": 0.1, "train": 0.5, "publish": 0.1, "record": 0.05, "other": 0.01}
_NUM_CHANGES = 14
"""Changes of the stage in one step."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of each response (default 256)")
    options = parser.parse_args()
    batch = _batch(options.prompts, options.samples, options.tokens)
    books = Books(RolloutSnapshot({}, {}), LedgerCounts(0, 0, 0, 0, 0), {})
    facts = RunFacts(max_prompt_tokens=64)
    shape = (options.prompts * options.samples, options.tokens)
    values, mask = torch.randn(shape), torch.ones(shape)
    memory = StageMemory()
    with tempfile.TemporaryDirectory() as folder:
        trackers = Trackers.of(["jsonl"], {})
        trackers.start({}, "run", project="benchmark", folder=Path(folder))
        metrics = step_metrics(batch, {}, {"generate": 0.4}, _STAGES, books, facts)
        rollouts = [(group.prompt, each) for group in batch.groups for each in group.trajectories]
        measured: dict[str, Callable[[], Any]] = {
            "step_metrics": lambda: step_metrics(batch, {}, {"generate": 0.4}, _STAGES, books, facts),
            "advantages_and_returns": lambda: [token_statistics(values, mask) for _ in range(2)],
            "log_probs": lambda: gap_metrics(*gap_sums(values, values, mask)),
            "memory": lambda: [memory.leave("train") for _ in range(_NUM_CHANGES)] and memory.take(),
            "trackers": lambda: trackers.log(1, metrics),
            "rollout_file": lambda: write_rollouts(Path(folder) / "rollouts.parquet", 1, rollouts),
        }
        results = {name: 1000 * _median_s(call) for name, call in measured.items()}
        trackers.finish()
    for name, value in results.items():
        print(f"{name:<24} {value:8.2f} ms")
    write_record(options.out, torch.device("cpu"), num_tokens=shape[0] * shape[1], milliseconds=results)


def _median_s(call: Callable[[], Any]) -> float:
    """Processor time, so that other work on the machine does not count."""
    seconds = []
    for _ in range(_REPEATS):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


def _batch(num_prompts: int, num_samples: int, num_tokens: int) -> RolloutBatch:
    rng = random.Random(0)

    def trajectory(uid: str, sample: int) -> Trajectory:
        made = Trajectory(
            uid=uid,
            sample=sample,
            tokens=tuple(rng.randrange(512) for _ in range(32 + num_tokens)),
            prompt_length=32,
            loss_mask=(0,) * 32 + (1,) * num_tokens,
            logprobs=(0.0,) * 32 + (-1.0,) * num_tokens,
            versions=(-1,) * 32 + (0,) * num_tokens,
            reward=float(rng.randrange(2)),
            stop_reason="stop",
            info={"response_text": "x" * num_tokens},
        )
        assert made.arrays.tokens.size, "as in a run, where the batch was padded before"
        return made

    def group(number: int) -> Group:
        prompt = Prompt(f"row{number}", ({"role": "user", "content": "?"},), "?", (1,) * 32, data_source="sums")
        return Group(prompt, tuple(trajectory(prompt.uid, sample) for sample in range(num_samples)))

    return RolloutBatch(tuple(group(number) for number in range(num_prompts)))


if __name__ == "__main__":
    main()
