"""The cost of computing prompts for groups of samples, compared with the same samples as separate prompts.

    python benchmarks/group_prefill.py [--samples 16] [--prompts 16] [--prompt-tokens 128]

Reports the number of prompt tokens that the engine computed, and the time. Both sides run in one process. For the
ungrouped side the prefix cache is off and all prompts differ, so that nothing can be shared.
"""

from __future__ import annotations

import time

from options import add_shape, add_work, parser_of
from record import write_record
from shapes import build_model, default_device, default_dtype, make_prompts, make_requests

from headwater.config.schema import EngineConfig
from headwater.engine.engine import Engine
from headwater.models.builtin.tiny import build_tokenizer


def run(engine: Engine, prompts: list[tuple[int, ...]], samples: int) -> tuple[int, float]:
    """Prompt tokens computed, and seconds, for one new token per sample: nearly all of it is prefill."""
    engine.generate(make_requests(prompts[:1], 1, 2, run=9))
    engine.set_version(engine.get_version() + 1)  # forgets the prefix cache
    before, started = engine.metrics().num_tokens_prefilled, time.perf_counter()
    engine.generate(make_requests(prompts, samples, 1))
    return engine.metrics().num_tokens_prefilled - before, time.perf_counter() - started


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    add_work(parser, samples=16, prompt_tokens=128)
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    device = default_device()
    num_sequences = options.prompts * options.samples
    rows = []
    for name, cache in (("grouped", True), ("ungrouped", False)):
        model = build_model(options.shape, device, default_dtype(device))
        settings = EngineConfig(max_sequences=num_sequences, prefix_cache=cache, memory_fraction=0.3)
        engine = Engine(model, build_tokenizer(), settings)
        num_prompts, samples = (options.prompts, options.samples) if cache else (num_sequences, 1)
        prompts = make_prompts(num_prompts, options.prompt_tokens, engine.limits.vocab_size)
        run(engine, prompts, samples)
        tokens, seconds = min((run(engine, prompts, samples) for _ in range(3)), key=lambda each: each[1])
        engine.close()
        rows.append({"side": name, "prompt_tokens_computed": tokens, "seconds": seconds})
        print(f"{name:<10} {tokens:>9,} prompt tokens computed  {seconds * 1e3:>9.1f} ms", flush=True)
    ratio = rows[1]["prompt_tokens_computed"] / rows[0]["prompt_tokens_computed"]
    speedup = rows[1]["seconds"] / rows[0]["seconds"]
    print(f"grouped computes 1/{ratio:.1f} of the prompt tokens, in 1/{speedup:.1f} of the time")
    write_record(options.out, device, shape=options.shape, samples=options.samples, rows=rows, ratio=ratio)


if __name__ == "__main__":
    main()
