"""Compare the products of a decode step with 64 to 1,024 rows, plain and with the kernel after them, on a CUDA device.

    PYTHONPATH=src python benchmarks/decode_products.py --out decode_products.json

For the shapes of Qwen2.5-1.5B and SmolLM2-135M it prints, in microseconds inside a replayed CUDA graph:

- ``gate_up`` and ``qkv``: cuBLAS and a second kernel, against each tile size of ``kernels/pair_linear.py``. Where one
  is faster, the record has it among ``choices``, which ``rollout_throughput.py --pair-choices FILE`` uses;
- ``invariant``: the products of deterministic mode with the present tiles, and with each of others. ``same_bits`` says
  whether a result has the bits of the present tiles, on which ``linear.SCALED_TILES`` relies;
- ``attention`` of a decode step in deterministic mode, by keys per block;
- one layer of the 1.5B decoder in a CUDA graph, before and after.

The exit status is 1 if a result differs from the plain path by more than ``MAX_ERROR``, or in a bit where it must not.
Kernels are compiled in several processes first. It takes about a minute; nothing new starts after ``--seconds``.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from decode_parts import (
    ATTENTION,
    COMPILED_ROWS,
    GATED,
    MATMULS,
    MODELS,
    ROTATED,
    InvariantProduct,
    PairedProduct,
    invariant_attention,
    layer,
)
from kernel_parts import DEVICE, Values, microseconds, relative_error
from options import parser_of
from record import write_record

from headwater.engine.kernels.linear import MatmulConfig
from headwater.engine.kernels.pair_linear import PairConfig
from headwater.engine.runners.paired import GATE_UP, QKV, MeasuredPairs, PairChoice

MAX_ERROR = 0.02  # of the largest value: a few roundings of bfloat16
ROWS = (256, 64, 1024)
INVARIANT_ROWS = (256, 64, 1024, 8192)
FASTER = 0.98
"""A choice must take at most this part of the plain path's time."""
COMPILERS = 8


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


def paired(model: str, product: str, rows: int, choices: list[PairChoice]) -> Iterator[Values]:
    work = PairedProduct(model, product, rows)
    plain = microseconds(work.plain, len(work.weights))
    # The two libraries choose kernels by different rules.
    products = {f"product_us_{library}": library_time(work, library) for library in ("cublas", "cublaslt")}
    yield show(f"{model} {product} rows={rows} plain", {"us": plain, **products})
    expected, times = work.plain(0), {}
    for config in work.configs:

        def measure(config: PairConfig = config) -> Values:
            error = relative_error(work.paired(config, 0), expected)
            us = microseconds(lambda index: work.paired(config, index), len(work.weights))
            return {"us": us, "of_plain": us / plain, "error": error}

        values = attempt(f"{model} {product} rows={rows} m,p,k,warps,stages={astuple(config)}", measure)
        if values["error"] < MAX_ERROR:
            times[config] = values["us"]
        yield values
    fastest = min(times, key=times.__getitem__, default=None)
    config = fastest if fastest is not None and times[fastest] <= FASTER * plain else None
    outputs, inputs = work.weights[0].shape
    choices.append(PairChoice(product, outputs, inputs, rows, config))


def library_time(work: PairedProduct, library: str) -> float:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        return microseconds(work.product, len(work.weights))
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def invariant(product: str, rows: int) -> Iterator[Values]:
    work = InvariantProduct(product, rows)
    present = microseconds(work.present, len(work.weights))
    yield show(f"invariant {product} rows={rows} present", {"us": present})
    expected = work.present(0)
    same = work.scaled(work.configs[0], 0)
    for config in work.configs:

        def measure(config: MatmulConfig = config) -> Values:
            actual = work.scaled(config, 0)
            us = microseconds(lambda index: work.scaled(config, index), len(work.weights))
            values: Values = {"us": us, "of_present": us / present, "error": relative_error(actual, expected)}
            return {**values, "same_bits": torch.equal(actual, same)}

        yield attempt(f"invariant {product} rows={rows} m,n,k,warps,stages={astuple(config)}", measure)
    us = microseconds(lambda index: work.scaled(None, index), len(work.weights))
    values: Values = {"us": us, "of_present": us / present, "same_bits": torch.equal(work.scaled(None, 0), same)}
    yield show(f"invariant {product} rows={rows} scaled tiles", values)


def compile_one(case: tuple[Any, ...]) -> str | None:
    """Compile a kernel into Triton's cache on disk. Return an error rather than raise it: the other cases continue."""
    kind, *rest, config = case
    try:
        if kind == "paired":
            PairedProduct(*rest, COMPILED_ROWS, num_weights=1).paired(config, 0)
        elif kind == "invariant":
            InvariantProduct(*rest, COMPILED_ROWS, num_weights=1).scaled(config, 0)
        else:
            invariant_attention(COMPILED_ROWS, config)(0)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


def compile_all() -> None:
    cases: list[tuple[Any, ...]] = [("paired", MODELS[0], GATE_UP, config) for config in GATED]
    cases += [("paired", model, QKV, config) for model in MODELS for config in ROTATED[model]]
    cases += [("invariant", product, config) for product in ("gate_up", "down", "lm_head", "qkv") for config in MATMULS]
    cases += [("attention", config) for config in ATTENTION]
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        for case, error in zip(cases, pool.map(compile_one, cases, chunksize=1), strict=True):
            if error is not None:
                print(*case, error, flush=True)


def run(seconds: float, choices: list[PairChoice]) -> Iterator[Values]:
    started = time.monotonic()
    compile_all()
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    shapes = itertools.product(ROWS, MODELS, (GATE_UP, QKV))
    # A prompt needs the logits of its last token only.
    invariants = [
        partial(invariant, product, rows)
        for rows, product in itertools.product(INVARIANT_ROWS, ("gate_up", "down", "lm_head", "qkv", "o"))
        if product != "lm_head" or rows <= 1024
    ]
    works = [
        *(partial(paired, model, product, rows, choices) for rows, model, product in shapes),
        partial(layers, choices),
        *invariants,
        attention,
        invariant_layers,
    ]
    for work in works:
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


def layers(choices: list[PairChoice]) -> Iterator[Values]:
    for rows in ROWS:
        plain_us, plain = layer(rows)
        yield show(f"layer rows={rows} plain", {"us": plain_us})
        us, hidden = layer(rows, pairs=MeasuredPairs(choices))
        yield show(f"layer rows={rows} chosen", {"us": us, "difference": relative_error(hidden, plain)})
        us, hidden = layer(rows, dependent=True)
        values = {"us": us, "same_bits": torch.equal(hidden, plain)}
        yield show(f"layer rows={rows} plain, dependent attention", values)


def attention() -> Iterator[Values]:
    for rows in (256, 64):
        for config in ATTENTION:

            def measure(rows: int = rows, config: Any = config) -> Values:
                return {"us": microseconds(invariant_attention(rows, config), 4)}

            yield attempt(f"attention rows={rows} m,keys,warps,stages={astuple(config)}", measure)


def invariant_layers() -> Iterator[Values]:
    for rows in (256, 64):
        present_us, present = layer(rows, deterministic=True)
        yield show(f"invariant layer rows={rows} present", {"us": present_us})
        for keys in (64, 32):
            us, hidden = layer(rows, deterministic=True, scaled=True, keys=keys)
            values = {"us": us, "difference": relative_error(hidden, present)}
            yield show(f"invariant layer rows={rows} scaled tiles, {keys} keys per block", values)


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=75.0, help="start nothing new after this long")
    options = parser.parse_args()
    torch.manual_seed(0)
    results: list[Values] = []
    choices: list[PairChoice] = []
    for each in run(options.seconds, choices):
        results.append(each)
        write_record(options.out, DEVICE, results=results, choices=[choice.record() for choice in choices])
    for choice in choices:
        print(choice, flush=True)
    # "Not below" rather than "above", so that NaN is wrong.
    wrong = [each for each in results if "error" in each and not each["error"] < MAX_ERROR]
    wrong += [each for each in results if each.get("same_bits") is False]
    for each in wrong:
        print("WRONG:", each["name"], flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
