"""What the controller has to handle on clusters of up to 1,000 GPUs, and where it becomes the bottleneck.

    python benchmarks/large_cluster.py [--gpus 8 64 256 1000] [--out benchmarks/results/large_cluster.json]

``headwater plan``'s simulation of a 7B model on H200s, three servers for each GPU of the learner, with a batch that
grows with the cluster. Three threads of the controller have work that grows with it (``batch_assembly.py``). The event
loop of the rollouts handles events, receives tokens and makes the records of episodes: compare ``events_per_s`` with
``scheduler_overhead.py`` and ``controller_load.py``. The main thread assembles batches while the learner's GPUs wait;
its share is part of the simulated step. Another thread writes the rollout files. They share Python's interpreter lock,
so the sum of the three ("all") may not exceed 100%. Weights are published at the rate within one machine: slower
networks give the controller less to do.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
from options import parser_of
from record import write_record

from headwater.planner.hardware import GPUS, SHAPES, Training
from headwater.planner.plan import WRITE_TOKEN_S, Roofline, Split, predict
from headwater.planner.workload import Lengths, Workload

MAX_STALENESS = 4
SAMPLES = 16
MAX_EPISODES = 1_000_000
"""More than `headwater plan` simulates, so that also the largest cluster reaches its steady state."""


def needed(num_gpus: int, mean_tokens: int) -> dict[str, Any]:
    """One prompt per step and server."""
    num_learner = max(1, num_gpus // 4)
    split = Split(num_learner, num_gpus - num_learner)
    workload = Workload(
        num_prompts=max(8, split.num_servers),
        num_samples=SAMPLES,
        prompt_tokens=256,
        lengths=Lengths.long_tailed(SAMPLES, 8 * mean_tokens, mean=mean_tokens),
        max_staleness=MAX_STALENESS,
    )
    model = Roofline(
        SHAPES["qwen2.5-7b"], GPUS["h200"], Training(is_checkpointed=True), context=mean_tokens / 2,
        weight_transfer="shared_memory",
    )  # fmt: skip
    row = predict(workload, model, split, MAX_STALENESS, max_episodes=MAX_EPISODES)
    assert row.prediction is not None, row.problem
    num_sampled = row.prediction.tokens_per_s / (1 - row.prediction.masked_share)
    main_s = model.costs(split).learner.step_per_token_s * num_sampled
    return {
        "gpus": num_gpus,
        "mean_tokens": mean_tokens,
        "prompts_per_step": workload.num_prompts,
        "is_shortened": row.is_shortened,
        "event_loop_share": row.controller_load,
        "main_thread_share": main_s,
        "writer_share": WRITE_TOKEN_S * num_sampled,
        **asdict(row.prediction),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 1000], help="sizes of the cluster")
    parser.add_argument("--mean-tokens", type=int, nargs="+", default=[500, 2000], help="mean lengths of responses")
    options = parser.parse_args()
    rows = []
    print(f"{'GPUs':>5}  {'length':>6}  {'tokens/s':>10}  {'step s':>7}  {'episodes/s':>10}  {'events/s':>8}  ", end="")
    print(f"{'event loop':>10}  {'main thread':>11}  {'writer':>6}  {'all':>5}")
    for mean_tokens in options.mean_tokens:
        for num_gpus in options.gpus:
            each = needed(num_gpus, mean_tokens)
            rows.append(each)
            print(f"{num_gpus:>5}  {mean_tokens:>6,}  {each['tokens_per_s']:>10,.0f}  {each['step_s']:>7.1f}  ", end="")
            print(f"{each['episodes_per_s']:>10,.1f}  {each['events_per_s']:>8,.0f}  ", end="")
            shares = [each[f"{thread}_share"] for thread in ("event_loop", "main_thread", "writer")]
            print(f"{shares[0]:>10.1%}  {shares[1]:>11.1%}  {shares[2]:>6.1%}  {sum(shares):>5.0%}", flush=True)
    print(f"{time.process_time():.0f} s of processor time")
    write_record(options.out, torch.device("cpu"), rows=rows, processor_s=time.process_time())


if __name__ == "__main__":
    main()
