"""The cost of stop strings in the engine's thread, per round and row, while no stop string is generated.

    python benchmarks/stop_strings.py --model smollm2 --stop "</answer>"

Rows receive random tokens of the model's tokenizer, eight per round. Times are CPU times of the thread, so a busy
machine changes them little. The first round also builds the tables.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from options import parser_of
from record import write_record

from headwater.core.requests import ModelRequest, SamplingParams
from headwater.engine.lanes import Drawn, Lanes
from headwater.engine.sequence import EngineSequence
from headwater.engine.stops import StopTables, cut_at_stop
from headwater.models.load import load_tokenizer

NUM_STEPS = 8


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="tiny:qwen3", help="whose tokenizer (default tiny:qwen3)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="a stop string (repeatable)")
    parser.add_argument("--rows", type=int, default=1024, help="sequences (default 1024)")
    parser.add_argument("--rounds", type=int, default=40, help="of 8 steps (default 40)")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    sampling = SamplingParams(NUM_STEPS * options.rounds, stop_strings=tuple(options.stop or ["</answer>"]))
    lanes, all_lanes = Lanes(options.rows, max_pages=1), np.arange(options.rows)
    rows = range(options.rows)
    requests = [ModelRequest(str(row), (5,), sampling, row) for row in rows]
    sequences = [EngineSequence(each, (), row, on_end=lambda _: None) for row, each in enumerate(requests)]
    lanes.take(sequences, rows, np.array([5], np.int32), np.ones((options.rows, 1), np.int32), 0)
    tables, generator, shape = StopTables(tokenizer, lanes), np.random.default_rng(0), (NUM_STEPS, options.rows)
    times, num_looks = [], 0
    for _ in range(options.rounds):
        tokens = generator.integers(10, len(tokenizer), shape).astype(np.int32)
        lanes.append(all_lanes, tokens, np.zeros(shape, np.float32), np.ones(shape, np.bool_), 0)
        started = time.thread_time()
        for lane in tables.worth_a_look(Drawn(tokens.size, [], all_lanes, tokens, [])):
            num_looks += 1
            lanes.collect(lane)
            sequence = lanes.sequence[lane]
            assert sequence is not None
            cut_at_stop(tokenizer, sequence)
        times.append(time.thread_time() - started)
    cost, share = statistics.median(times[1:]), num_looks / options.rows / options.rounds
    print(f"first round {times[0] * 1e3:.0f} ms, then {cost * 1e3:.2f} ms a round: {cost / options.rows * 1e6:.2f} us")
    print(f"per row; {share:.1%} of the rows had a token that may complete a stop string, and were looked at")
    write_record(options.out, torch.device("cpu"), seconds=times, share_looked_at=share)


if __name__ == "__main__":
    main()
