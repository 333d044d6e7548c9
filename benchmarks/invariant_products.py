"""Compare the tiles of the products of deterministic mode on a CUDA device.

    PYTHONPATH=src python benchmarks/invariant_products.py --out invariant_products.json

For the shapes of Qwen2.5-1.5B it prints, in microseconds inside a replayed CUDA graph:

- each product with the fixed tiles of GPUs other than ``linear.SCALED_TILES_ON``, with each of other tiles, and with
  those that the engine chooses for the number of rows. ``same_bits`` says whether a result has the bits of the first
  tiles, on which deterministic mode relies;
- ``attention`` of a decode step in deterministic mode, by keys per block;
- one layer of the decoder in a CUDA graph: of the fast mode, and of deterministic mode with fixed and with chosen
  tiles.

The exit status is 1 if a result differs from that of the fixed tiles by more than ``MAX_ERROR``, or in a bit where it
must not. Kernels are compiled in several processes first. It takes about a minute; nothing new starts after
``--seconds``.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import cache, partial
from typing import Any

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
    MODEL,
    PAGE,
    PRODUCTS,
    SCALE,
    Pages,
    Values,
    cold,
    microseconds,
    randn,
    relative_error,
)
from options import parser_of
from record import write_record
from shapes import build_model
from torch import Tensor

from headwater.engine.attention.cuda import CudaDecode, CudaPrefill
from headwater.engine.kernels import linear, prefill_attention
from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.gated_linear import gated_linear
from headwater.engine.kernels.linear import MatmulConfig, invariant_linear, invariant_parts
from headwater.engine.kernels.norm import add_rms_norm, sum_add_rms_norm
from headwater.engine.kernels.prefill_attention import PrefillConfig
from headwater.engine.kv_cache import KVCache
from headwater.engine.model_spec import ModelSpec
from headwater.engine.runners.cuda import CudaOps, InvariantCudaOps
from headwater.engine.runners.decoder import FusedDecoder

MAX_ERROR = 0.02  # of the largest value: a few roundings of bfloat16
ROWS = (256, 64, 1024, 8192)
COMPILED_ROWS = 64
COMPILERS = 8
# Tokens, outputs and inputs per tile, warps, stages. The first is the one that others must agree with bit for bit.
MATMULS = [
    MatmulConfig(*each)
    for each in (
        (64, 64, 64, 4, 5), (64, 128, 64, 4, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3),
    )
]  # fmt: skip
# Rows (queries times heads) and keys per tile, warps, stages. The first is the present one.
ATTENTION = [PrefillConfig(*each) for each in ((64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 4))]


@contextmanager
def switched(*, fixed: bool = False, keys: int = 64) -> Iterator[None]:
    """The kernels with these switches. Graphs keep what they were captured with."""
    switches = (
        (linear, "SCALED_TILES_ON", None if fixed else linear.SCALED_TILES_ON),
        (prefill_attention, "KEYS_PER_BLOCK", keys),
    )
    before = [getattr(module, name) for module, name, _ in switches]
    for module, name, value in switches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(switches, before, strict=True):
            setattr(module, name, value)


class Product:
    """A product of deterministic mode and what follows: SiLU after ``gate_up``, the norm after ``o`` and ``down``."""

    def __init__(self, product: str, rows: int, num_weights: int | None = None) -> None:
        self.product = product
        outputs, inputs = PRODUCTS[product]
        num_bytes = outputs * inputs * DTYPE.itemsize
        weights = [1] * num_weights if num_weights else cold(lambda: 1, num_bytes)
        self.weights = [randn(outputs, inputs, scale=0.03) for _ in weights]
        self.x, self.norm_weight = randn(rows, inputs), randn(HIDDEN)
        # Zeros: a call adds its product to them, and the result must not depend on the calls before.
        self.residual = torch.zeros(rows, HIDDEN, device=DEVICE)

    def fixed(self, index: int) -> Tensor:
        weight = self.weights[index]
        with switched(fixed=True):
            if self.product == "gate_up":
                return silu_and_mul(invariant_linear(self.x, weight))
            if self.product in ("o", "down"):
                product = invariant_linear(self.x, weight, None, torch.float32)
                return add_rms_norm(product, self.residual.zero_(), self.norm_weight, EPS)
            return invariant_linear(self.x, weight, None, self._out_dtype)

    def scaled(self, config: MatmulConfig | None, index: int) -> Tensor:
        """With ``config``, or with the tiles that the engine chooses."""
        weight = self.weights[index]
        if self.product == "gate_up":
            return gated_linear(self.x, weight, None, config)
        if self.product in ("o", "down"):
            parts = invariant_parts(self.x, weight, config)
            return sum_add_rms_norm(parts, None, self.residual.zero_(), self.norm_weight, EPS)
        return invariant_linear(self.x, weight, None, self._out_dtype, config)

    @property
    def _out_dtype(self) -> torch.dtype:
        return torch.float32 if self.product == "lm_head" else DTYPE


def attention_of(rows: int, config: PrefillConfig) -> Callable[[int], Tensor]:
    """Decoding with one query per row, over four caches in turn."""
    lengths = [CONTEXT - row % PAGE for row in range(rows)]
    sets = [Pages(lengths, KV_HEADS, HEAD_DIM) for _ in range(4)]
    starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    places = torch.stack([starts[:-1], torch.zeros_like(starts[:-1])], dim=1)
    q = randn(rows, HEADS, HEAD_DIM)

    def call(index: int) -> Tensor:
        pages = sets[index]
        cache = pages.keys, pages.values, pages.table, places, starts, pages.contexts
        return prefill_attention.paged_prefill_attention(q, *cache, SCALE, config=config)

    return call


@cache
def decoder_of(deterministic: bool) -> tuple[FusedDecoder, ModelSpec]:
    model = build_model(MODEL, DEVICE, DTYPE)
    spec = ModelSpec.of(model)
    return FusedDecoder(model, spec, InvariantCudaOps() if deterministic else CudaOps()), spec


def layer(rows: int, *, deterministic: bool = False, **switches: Any) -> tuple[float, Tensor]:
    """Microseconds of a layer, all layers in one graph, and the last hidden states."""
    decoder, spec = decoder_of(deterministic)
    torch.manual_seed(0)
    pages = Pages([CONTEXT - row % PAGE for row in range(rows)], 1, 1)  # for its table
    kv_cache = KVCache(spec, len(pages.keys), PAGE)
    for each in (each for index in range(spec.num_layers) for each in kv_cache.layer(index)):
        each.normal_()
    positions = pages.contexts.long() - 1
    slots = pages.table.long().gather(1, positions[:, None] // PAGE)[:, 0] * PAGE + positions % PAGE
    ids = torch.randint(0, spec.vocab_size, (rows,), device=DEVICE)
    kind = CudaPrefill.of_rows if deterministic else CudaDecode
    attention = kind(kv_cache, pages.table, pages.contexts)
    with switched(**switches):
        us = microseconds(lambda _: decoder(ids, positions, slots, attention, kv_cache), 1, calls=1)
        hidden = decoder(ids, positions, slots, attention, kv_cache)
    return us / spec.num_layers, hidden


def show(name: str, values: Values) -> Values:
    shown = (f"{key}={each:.4g}" if isinstance(each, float) else f"{key}={each}" for key, each in values.items())
    print(f"{name:64s}", *shown, flush=True)
    return {"name": name, **values}


def attempt(name: str, measure: Callable[[], Values]) -> Values:
    """A configuration that does not fit must not cost the others."""
    try:
        return show(name, measure())
    except Exception as error:  # noqa: BLE001
        torch.cuda.synchronize()
        return show(name, {"error": float("nan"), "message": f"{type(error).__name__}: {error}"[:200]})


def products(product: str, rows: int) -> Iterator[Values]:
    work = Product(product, rows)
    fixed_us, expected = microseconds(work.fixed, len(work.weights)), work.fixed(0)
    yield show(f"{product} rows={rows} fixed tiles", {"us": fixed_us})
    same = work.scaled(MATMULS[0], 0)
    for config in (*MATMULS, None):

        def measure(config: MatmulConfig | None = config) -> Values:
            actual = work.scaled(config, 0)
            us = microseconds(lambda index: work.scaled(config, index), len(work.weights))
            values: Values = {"us": us, "of_fixed": us / fixed_us, "error": relative_error(actual, expected)}
            return {**values, "same_bits": torch.equal(actual, same)}

        tiles = "chosen tiles" if config is None else f"m,n,k,warps,stages={astuple(config)}"
        yield attempt(f"{product} rows={rows} {tiles}", measure)


def attention() -> Iterator[Values]:
    for rows in (256, 64):
        for config in ATTENTION:

            def measure(rows: int = rows, config: Any = config) -> Values:
                return {"us": microseconds(attention_of(rows, config), 4)}

            yield attempt(f"attention rows={rows} m,keys,warps,stages={astuple(config)}", measure)


def layers() -> Iterator[Values]:
    for rows in (256, 64):
        fast_us, _ = layer(rows)
        yield show(f"layer rows={rows} fast", {"us": fast_us})
        fixed_us, fixed = layer(rows, deterministic=True, fixed=True)
        yield show(f"layer rows={rows} fixed tiles", {"us": fixed_us})
        for keys in (64, 32):
            us, hidden = layer(rows, deterministic=True, keys=keys)
            values = {"us": us, "difference": relative_error(hidden, fixed)}
            yield show(f"layer rows={rows} chosen tiles, {keys} keys per block", values)


def compile_one(case: tuple[Any, ...]) -> str | None:
    """Compile a kernel into Triton's cache on disk. Returns an error rather than raising it: the other cases go on."""
    *product, config = case
    try:
        if product:
            Product(*product, COMPILED_ROWS, num_weights=1).scaled(config, 0)
        else:
            attention_of(COMPILED_ROWS, config)(0)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


def compile_all() -> None:
    cases: list[tuple[Any, ...]] = list(itertools.product(("gate_up", "down", "lm_head", "qkv"), MATMULS))
    cases += [(config,) for config in ATTENTION]
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        for case, error in zip(cases, pool.map(compile_one, cases, chunksize=1), strict=True):
            if error is not None:
                print(*case, error, flush=True)


def run(seconds: float) -> Iterator[Values]:
    started = time.monotonic()
    compile_all()
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    # A prompt needs the logits of its last token only.
    all_products = [
        partial(products, product, rows)
        for rows, product in itertools.product(ROWS, ("gate_up", "down", "lm_head", "qkv", "o"))
        if product != "lm_head" or rows <= 1024
    ]
    for work in (layers, *all_products, attention):
        if time.monotonic() - started > seconds:
            print("out of time; the rest is left out", flush=True)
            return
        try:
            yield from work()
        except Exception as error:  # noqa: BLE001 - one section must not cost the others
            traceback.print_exc(limit=-4)
            message = f"{type(error).__name__}: {error}"[:200]
            yield show(f"{getattr(work, 'func', work).__name__}", {"error": float("nan"), "message": message})
        torch.cuda.empty_cache()


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=75.0, help="start nothing new after this long")
    options = parser.parse_args()
    torch.manual_seed(0)
    results: list[Values] = []
    for each in run(options.seconds):
        results.append(each)
        write_record(options.out, DEVICE, results=results)
    # "Not below" rather than "above", so that NaN is wrong.
    wrong = [each for each in results if "error" in each and not each["error"] < MAX_ERROR]
    wrong += [each for each in results if each.get("same_bits") is False]
    for each in wrong:
        print("WRONG:", each["name"], flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
