"""Tokens/s with 512 and with 4,096 queued requests. Equal rates mean that the cost per request is constant.

python benchmarks/queue_depth.py [--depths 512 4096]
"""

from __future__ import annotations

import statistics
import time

from options import add_shape, add_work, parser_of
from record import write_record
from shapes import build_model, default_device, default_dtype, make_prompts, make_requests

from headwater.config.schema import EngineConfig
from headwater.engine.engine import Engine
from headwater.models.builtin.tiny import build_tokenizer


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    add_work(parser, prompt_tokens=32, new_tokens=32, runs=5)
    parser.add_argument("--depths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rows", type=int, default=256, help="sequences that are generated concurrently")
    options = parser.parse_args()
    device = default_device()
    model = build_model(options.shape, device, default_dtype(device))
    settings = EngineConfig(max_sequences=options.rows, memory_fraction=0.3)
    engine = Engine(model, build_tokenizer(), settings)
    engine.generate(
        make_requests(make_prompts(options.rows, options.prompt_tokens, engine.limits.vocab_size, 3), 1, 20)
    )
    rows = []
    for depth in options.depths:
        prompts = make_prompts(depth, options.prompt_tokens, engine.limits.vocab_size, seed=depth)
        rates = []
        for run in range(options.runs):
            engine.set_version(engine.get_version() + 1)
            requests = make_requests(prompts, 1, options.new_tokens, run)
            started = time.perf_counter()
            engine.generate(requests)
            rates.append(depth * options.new_tokens / (time.perf_counter() - started))
        rate = statistics.median(rates)  # a short run has luckier ones than a long run, so not the fastest
        rows.append({"queued": depth, "tokens_per_s": rate, "runs": rates})
        print(f"{depth:>6} queued  {rate:>10,.0f} tokens/s", flush=True)
    engine.close()
    ratio = rows[-1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    print(f"{options.depths[-1]} against {options.depths[0]} queued: {ratio:.2f} times the rate")
    write_record(options.out, device, shape=options.shape, rows=rows, ratio=ratio)


if __name__ == "__main__":
    main()
