"""Choose the tiles of the products with few rows (``engine/runners/skinny.py``) on a CUDA device.

    PYTHONPATH=src python benchmarks/skinny_products.py --out skinny_products.json

For the shape of Qwen2.5-1.5B, with 1, 8 and 16 rows, it prints:

- for each product and each configuration, the time and the rate at which the weight is read, beside the kernels of the
  plain path that do the same work: ``qkv`` and ``gate_up`` include the norm before them and what follows them;
- decode attention whose splits are combined by a second kernel or by the last split;
- one layer of the decoder in a CUDA graph, on the plain path, with the present configurations and with the best ones,
  launched one after the other or dependent (``SkinnyConfig.dependent``). ``difference`` is that of the last hidden
  states from the plain path, relative to the largest; roundings of 28 layers make a few per cent.

Every product is compared with the plain path. The exit status is 1 if one differs by more than ``MAX_ERROR``. Kernels
are compiled in several processes first. It takes about a minute; nothing new starts after ``--seconds``.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import astuple, replace
from typing import Any

import kernel_times
import torch
from kernel_parts import (
    CONTEXT,
    DEVICE,
    DTYPE,
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    PAGE,
    PRODUCTS,
    Pages,
    Values,
    cold,
    microseconds,
    randn,
    relative_error,
)
from options import parser_of
from record import write_record
from torch import Tensor
from torch.nn import functional as F

from headwater.engine.kernels import skinny_pairs, skinny_sums
from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.decode_attention import paged_decode_attention
from headwater.engine.kernels.linear import split_linear, suggest_slices
from headwater.engine.kernels.norm import rms_norm, sum_add_rms_norm
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.skinny_pairs import NormedRows, SkinnyConfig, normed_gate_up, normed_qkv, padded
from headwater.engine.kernels.skinny_sums import add_product, make_arrived

MAX_ERROR = 0.02  # of the largest value: a few roundings of bfloat16
ROWS = (8, 1, 16)
# Outputs and inputs per tile, warps, stages, slices of the sum over inputs. The first of each is the present one.
CONFIGS = {
    "gate_up": [(64, 128, 4, 4, 1), (128, 64, 4, 5, 1), (128, 128, 4, 3, 1), (32, 128, 4, 5, 1), (64, 64, 4, 6, 1),
                (64, 256, 4, 3, 1), (32, 256, 4, 4, 1), (128, 128, 8, 4, 1)],
    "qkv": [(16, 256, 4, 5, 1), (16, 128, 4, 4, 1), (16, 512, 4, 4, 1), (32, 128, 4, 6, 1), (32, 256, 4, 5, 1),
            (16, 256, 2, 5, 1)],
    "o": [(32, 128, 4, 6, 3), (16, 128, 4, 6, 2), (16, 256, 4, 4, 2), (16, 256, 4, 6, 1), (32, 256, 4, 3, 3),
          (64, 128, 4, 3, 6)],
    "down": [(32, 128, 4, 6, 5), (64, 128, 4, 5, 7), (32, 256, 4, 4, 5), (32, 128, 4, 8, 3), (16, 256, 4, 5, 3),
             (64, 128, 4, 6, 5), (32, 256, 4, 4, 7), (16, 512, 4, 4, 2)],
}  # fmt: skip
PRESENT = {product: SkinnyConfig(*configs[0]) for product, configs in CONFIGS.items()}
COMPILERS = 8


class Work:
    """One product of a layer on the plain path and in one kernel, over weights that are not in the L2 cache."""

    def __init__(self, product: str, rows: int, num_weights: int | None = None) -> None:
        self.product, self.rows = product, rows
        self.outputs, self.inputs = PRODUCTS[product]
        if num_weights is None:
            self.weights = kernel_times.weights_of(product)
        else:
            self.weights = [randn(self.outputs, self.inputs, scale=0.03) for _ in range(num_weights)]
        self.norm_weight, self.x = randn(HIDDEN), randn(rows, self.inputs)
        self.residual, self.arrived = randn(rows, HIDDEN, dtype=torch.float32), make_arrived(DEVICE)
        # As many parts and sums of squares as the product before this one leaves.
        before = "o" if product == "gate_up" else "down"
        self.parts = torch.zeros(suggest_slices(rows, *PRODUCTS[before]), rows, HIDDEN, device=DEVICE)
        blocks = HIDDEN // CONFIGS[before][0][0]
        squares = self.residual.square().view(rows, blocks, -1).sum(-1)
        scaled = self.residual * self.norm_weight
        self.normed = NormedRows(scaled, F.pad(squares.T, (0, padded(rows) - rows)).contiguous(), EPS)
        self.bias = randn(self.outputs) if product == "qkv" else None
        at = torch.arange(rows, device=DEVICE)
        angles = torch.rand(1024, HEAD_DIM // 2, device=DEVICE) * 6.3
        self.tables, self.positions, self.slots = (angles.cos(), angles.sin()), at * 7, PAGE + at * 9
        self.caches = [randn(4, KV_HEADS, PAGE, HEAD_DIM), randn(4, KV_HEADS, PAGE, HEAD_DIM)]

    @property
    def num_bytes(self) -> int:
        return self.outputs * self.inputs * DTYPE.itemsize

    def plain(self, index: int) -> Tensor:
        weight = self.weights[index]
        if self.product in ("o", "down"):
            return split_linear(self.x, weight, suggest_slices(self.rows, self.outputs, self.inputs))
        hidden = sum_add_rms_norm(self.parts, None, self.residual, self.norm_weight, EPS)
        product = F.linear(hidden, weight, self.bias)
        if self.product == "gate_up":
            return silu_and_mul(product)
        return rope_and_store(product, *self.tables, self.positions, self.slots, *self.caches, HEADS)

    def skinny(self, config: SkinnyConfig, index: int) -> Any:
        weight = self.weights[index]
        if self.product == "gate_up":
            return normed_gate_up(self.normed, weight, None, config)
        if self.product == "qkv":
            place = self.tables, self.positions, self.slots, (self.caches[0], self.caches[1])
            return normed_qkv(self.normed, weight, self.bias, *place, HEADS, config=config)
        return add_product(self.x, weight, None, self.residual, self.norm_weight, EPS, self.arrived, config)

    def error(self, config: SkinnyConfig) -> float:
        """The relative difference of the one kernel from the plain path."""
        if self.product in ("gate_up", "qkv"):
            expected = self.plain(0)
            return relative_error(self.skinny(config, 0), expected)
        expected_sum = self.residual + self.plain(0).sum(0)
        prepared = self.skinny(config, 0)
        inverse_rms = torch.rsqrt(prepared.squares.sum(0)[: self.rows, None] / HIDDEN + EPS)
        expected_norm = rms_norm(expected_sum, self.norm_weight, EPS)
        errors = (
            relative_error(self.residual, expected_sum),
            relative_error(prepared.scaled * inverse_rms, expected_norm),
        )
        self.residual.normal_()
        return max(errors)


def compile_one(case: tuple[str, SkinnyConfig]) -> str | None:
    """Compile a kernel into Triton's cache on disk. Returns an error rather than raising it: the other cases go on."""
    product, config = case
    try:
        Work(product, 8, num_weights=1).skinny(config, 0)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


def measure(work: Work, config: SkinnyConfig) -> Values:
    error = work.error(config)
    us = microseconds(lambda index: work.skinny(config, index), len(work.weights))
    return {"us": us, "gb_s": work.num_bytes / us / 1e3, "error": error}


def show(name: str, values: Values) -> Values:
    shown = (f"{key}={each:.4g}" if isinstance(each, float) else f"{key}={each}" for key, each in values.items())
    print(f"{name:52s}", *shown, flush=True)
    return {"name": name, **values}


def products(rows: int, is_over: Callable[[], bool]) -> Generator[Values, None, dict[str, SkinnyConfig]]:
    """Every configuration. Returns the fastest of each product."""
    fastest: dict[str, SkinnyConfig] = {}
    for product, configs in CONFIGS.items():
        work, times = Work(product, rows), {}
        us = microseconds(work.plain, len(work.weights))
        cublas_us = microseconds(lambda index, work=work: F.linear(work.x, work.weights[index]), len(work.weights))
        plain = {"us": us, "product_us": cublas_us, "product_gb_s": work.num_bytes / cublas_us / 1e3}
        yield show(f"{product} rows={rows} plain", plain)
        for numbers in configs:
            if is_over():
                return fastest
            name = f"{product} rows={rows} n,k,warps,stages,slices={numbers}"
            try:
                values = measure(work, SkinnyConfig(*numbers))
            except Exception as error:  # noqa: BLE001 - a configuration that does not fit must not cost the others
                yield show(name, {"error": float("nan"), "message": f"{type(error).__name__}: {error}"[:200]})
                continue
            times[numbers] = values["us"]
            yield show(name, values)
        if times:
            fastest[product] = SkinnyConfig(*min(times, key=times.__getitem__))
    return fastest


def attention(rows: int, splits: int, together: bool) -> Values:
    lengths = [CONTEXT - row % PAGE for row in range(rows)]
    num_bytes = 2 * sum(lengths) * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    sets, q = cold(lambda: Pages(lengths), num_bytes), randn(rows, HEADS, HEAD_DIM)
    arrived = torch.zeros(rows * KV_HEADS, dtype=torch.int32, device=DEVICE) if together else None

    def call(index: int, arrived: Tensor | None = arrived) -> Tensor:
        pages = sets[index]
        cache = pages.keys, pages.values, pages.table, pages.contexts
        return paged_decode_attention(q, *cache, 0.09, num_splits=splits, arrived=arrived)

    error = relative_error(call(0), call(0, None))
    return {"us": microseconds(call, len(sets)), "error": error}


def use(configs: dict[str, SkinnyConfig]) -> None:
    """Make the decoder's layers use these configurations."""
    pairs = {PRODUCTS[name][0]: configs[name] for name in ("gate_up", "qkv")}
    sums = {PRODUCTS[name]: configs[name] for name in ("o", "down")}
    skinny_pairs.pair_config = lambda outputs: pairs[outputs]
    skinny_sums.sum_config = lambda outputs, inputs: sums[outputs, inputs]


def layers(name: str, configs: dict[str, SkinnyConfig]) -> Iterator[Values]:
    use(configs)
    for rows in ROWS:
        plain, ours = (kernel_times.decoder_pass(rows, skinny)() for skinny in (False, True))
        values = {**kernel_times.layer(rows, skinny=True), "difference": relative_error(ours, plain)}
        yield show(f"layer rows={rows} {name}", values)


def dependent(configs: dict[str, SkinnyConfig]) -> dict[str, SkinnyConfig]:
    return {product: replace(config, dependent=True) for product, config in configs.items()}


def compile_all() -> None:
    cases = [(product, SkinnyConfig(*each)) for product, configs in CONFIGS.items() for each in configs]
    cases += dependent(PRESENT).items()
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        compiled = pool.map_async(compile_one, cases, chunksize=1)
        kernel_times.fused_decoder()  # meanwhile
        for case, error in zip(cases, compiled.get(), strict=True):
            if error is not None:
                print(*case, error, flush=True)


def run(seconds: float) -> Iterator[Values]:
    started = time.monotonic()
    compile_all()
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    for rows in ROWS:
        yield show(f"layer rows={rows} plain", kernel_times.layer(rows))
    yield from layers("present", PRESENT)
    yield from layers("present, dependent", dependent(PRESENT))
    best = dict(PRESENT)
    for rows in ROWS:
        fastest = yield from products(rows, lambda: time.monotonic() - started > seconds)
        if rows == ROWS[0]:
            for splits in (4, 8, 16):
                for together in (False, True):
                    yield show(f"attention {rows=} {splits=} {together=}", attention(rows, splits, together))
            best |= fastest
            yield from layers("best of 8 rows", best)
            yield from layers("best of 8 rows, dependent", dependent(best))
    print("best with 8 rows:", {product: astuple(config) for product, config in best.items()}, flush=True)


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=50.0, help="start no further configuration after this long")
    options = parser.parse_args()
    torch.manual_seed(0)
    results: list[Values] = []
    for each in run(options.seconds):
        results.append(each)
        write_record(options.out, DEVICE, results=results)
    # "Not below" rather than "above", so that NaN is wrong.
    sys.exit(any("error" in each and not each["error"] < MAX_ERROR for each in results))


if __name__ == "__main__":
    main()
