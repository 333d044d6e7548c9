"""The time of one sampling step when none, one or all rows truncate their distribution with top-k or top-p.

    python benchmarks/sampling_filters.py --rows 1024 --vocabulary 151936

On a GPU the step is the one that the engine captures in a CUDA graph. `sorted_completely` is the step with every row of
the batch sorted by the plain sampler. Logits are random. With a spread of 6 (the default), top-p keeps few tokens, as
of a language model's distribution. With a spread of 0.8, that of random weights, it keeps most of the vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from options import parser_of
from record import write_record
from torch import Tensor

from headwater.core.requests import SamplingParams
from headwater.engine.sampler import SamplingBatch, sample, sample_cut, sample_uncut

FILTERS = {
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k_top_p": {"top_k": 50, "top_p": 0.95},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="sequences (default 1024)")
    parser.add_argument("--vocabulary", type=int, default=151936, help="tokens (default 151936)")
    parser.add_argument("--spread", type=float, default=6.0, help="standard deviation of the logits (default 6)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the logits on a GPU")
    parser.add_argument("--runs", type=int, default=5, help="timed runs (default 5)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn((options.rows, options.vocabulary), generator=generator, device=device) * options.spread
    logits = logits.to(getattr(torch, options.dtype)) if device.type == "cuda" else logits
    times = {"none": timed(step_of(logits, 0, {}), device, options.runs)}
    for name, cut in FILTERS.items():
        for label, num_cut in (("one", 1), ("all", options.rows)):
            times[f"{name}_{label}"] = timed(step_of(logits, num_cut, cut), device, options.runs)
    times["sorted_completely"] = timed(sorted_completely(logits), device, options.runs)
    for label, seconds in times.items():
        print(f"{label:>18}: {statistics.median(seconds) * 1e3:9.2f} ms")
    write_record(
        options.out, device, rows=options.rows, vocabulary=options.vocabulary, spread=options.spread,
        dtype=str(logits.dtype), seconds=times,
    )  # fmt: skip


def step_of(logits: Tensor, num_cut: int, cut: dict[str, float]) -> Callable[[], object]:
    """One step in which the first ``num_cut`` rows are truncated."""
    batch, positions = batch_of(logits, num_cut, cut)
    if logits.device.type != "cuda":
        return lambda: sample(logits, batch, positions)
    from headwater.engine.kernels.truncation import sample_truncated

    rows = torch.arange(num_cut, device=logits.device)
    filters = batch.top_k, batch.top_p, batch.min_p
    return captured(lambda: sample_truncated(logits, batch.keys, positions, batch.temperature, filters, rows))


def sorted_completely(logits: Tensor) -> Callable[[], object]:
    """The plain sampler, with all rows sorted."""
    batch, positions = batch_of(logits, len(logits), FILTERS["top_p"])
    batch = replace(batch, needs=replace(batch.needs, is_wide=True))

    def step() -> object:
        return sample_uncut(logits, batch, positions), sample_cut(logits, batch, positions, may_look=False)

    return captured(step) if logits.device.type == "cuda" else step


def batch_of(logits: Tensor, num_cut: int, cut: dict[str, float]) -> tuple[SamplingBatch, Tensor]:
    rows = range(len(logits))
    params = [SamplingParams(1, **(cut if row < num_cut else {})) for row in rows]
    batch = SamplingBatch.build(params, list(rows), logits.device)
    return batch, torch.zeros(len(logits), dtype=torch.int64, device=logits.device)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.inference_mode()
def timed(step: Callable[[], object], device: torch.device, num_runs: int) -> list[float]:
    step()
    times = []
    for _ in range(num_runs):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    main()
