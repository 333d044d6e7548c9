"""How much ``rollout.weight_encoding=delta`` saves on updates of AdamW, and what encoding costs.

    python benchmarks/weight_delta.py --shape smollm2 --out results/weight_delta.json

A policy-gradient loss on random tokens with random advantages, AdamW with the usual settings, weights in float32. After
each step the weights are encoded against those of the step before, as they are sent in float32 and in bfloat16. The
first two steps are not counted: the averages of AdamW begin at zero. ``share`` is the encoded size over the plain size.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from options import add_shape, parser_of
from record import write_record
from shapes import build_model, default_device

from headwater.weights.delta import DeltaReader, DeltaWriter

NUM_SKIPPED = 2


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    parser.add_argument("--steps", type=int, default=6, help="optimiser steps (default 6)")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5], help="learning rates")
    options = parser.parse_args()
    rows = [row for rate in options.rates for row in measure(options, rate)]
    for row in rows:
        print(
            f"{options.shape} learning rate {row['rate']:g} {row['dtype']:<8} {row['share']:7.1%} of the bytes, "
            f"{row['changed']:7.1%} of the numbers changed, encode {row['encode_gb_per_s']:.2f} GB/s, decode "
            f"{row['decode_gb_per_s']:.2f} GB/s"
        )
    write_record(options.out, default_device(), shape=options.shape, rows=rows)


def measure(options: Any, rate: float) -> list[dict[str, Any]]:
    device = default_device()
    model = build_model(options.shape, device, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    sides = {dtype: _Side(dtype) for dtype in (torch.float32, torch.bfloat16)}
    generator = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        tokens = torch.randint(model.config.vocab_size, (8, 64), generator=generator).to(device)
        advantages = torch.randn(8, 1, generator=generator).to(device)
        logprobs = model(tokens[:, :-1]).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-(advantages * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for side in sides.values():
            side.take(model, is_counted=step >= NUM_SKIPPED)
    return [{"rate": rate, **side.result()} for side in sides.values()]


class _Side:
    """One number type in which weights are sent."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._writer, self._reader = DeltaWriter(), DeltaReader()
        self._before: dict[str, torch.Tensor] = {}
        self._rows: list[dict[str, float]] = []

    def take(self, model: Any, *, is_counted: bool) -> None:
        row = dict.fromkeys(("plain", "sent", "numbers", "changed", "encode_s", "decode_s"), 0.0)
        for name, parameter in model.named_parameters():
            values = parameter.detach().to("cpu", self._dtype).reshape(-1)
            data, into = values.view(torch.uint8), torch.empty(values.nbytes, dtype=torch.uint8)
            started = time.perf_counter()
            message = self._writer.encode(name, data, self._dtype.itemsize)
            row["encode_s"] += time.perf_counter() - started
            started = time.perf_counter()
            self._reader.decode(name, message, into, self._dtype.itemsize)
            row["decode_s"] += time.perf_counter() - started
            assert torch.equal(into, data), "exact"
            before = self._before.get(name)
            row["changed"] += 0 if before is None else int((before != values).sum())
            self._before[name] = values.clone()
            row["plain"] += values.nbytes
            row["sent"] += len(message)
            row["numbers"] += values.numel()
        if is_counted:
            self._rows.append(row)

    def result(self) -> dict[str, Any]:
        def median(name: str, over: str) -> float:
            return statistics.median(row[name] / row[over] for row in self._rows)

        return {
            "dtype": str(self._dtype).removeprefix("torch."),
            "share": median("sent", "plain"),
            "changed": median("changed", "numbers"),
            "encode_gb_per_s": median("plain", "encode_s") / 1e9,
            "decode_gb_per_s": median("plain", "decode_s") / 1e9,
        }


if __name__ == "__main__":
    main()
