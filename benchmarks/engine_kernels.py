"""Check and time the engine's kernels on a CUDA device.

    PYTHONPATH=src python benchmarks/engine_kernels.py --only check layer --out kernels.json

Times are microseconds per call inside a replayed CUDA graph. Every call of the graph reads different weights, caches
and logits, so that they come from memory and not from the L2 cache. The exit status is 1 if a kernel raised an error,
differed in a bit where it must not, or differed from its reference by more than ``MAX_ERROR``.
"""

from __future__ import annotations

import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterable

import kernel_checks as checks
import kernel_times as times
import torch
import triton
from kernel_parts import DEVICE, DTYPE, PRODUCTS, ROWS, Values
from options import parser_of
from record import write_record

MAX_ERROR = 0.02  # of the largest value: a few roundings of bfloat16


def grid(work: Callable[..., Values], **values: Iterable[object]) -> list[tuple[Callable[..., Values], Values]]:
    """``work`` with each combination of the values of its arguments."""
    return [(work, dict(zip(values, each, strict=True))) for each in itertools.product(*values.values())]


SECTIONS = {
    "check": [
        *grid(checks.check_norms_and_activations),
        *grid(checks.check_rope, norms=(False, True)),
        *grid(checks.check_decode, dtype=(DTYPE, torch.float32), shape=((12, 2, 128), (9, 3, 64)), splits=(1, 4)),
        *grid(checks.check_prefill, dtype=(DTYPE, torch.float32), shape=((12, 2, 128), (9, 3, 64))),
        *grid(checks.check_sampler, dtype=(DTYPE, torch.float32)),
        *grid(checks.check_invariant_linear),
        *grid(checks.check_split_linear, product=("o", "down")),
    ],
    "layer": grid(times.layer, rows=ROWS),
    "split": grid(times.split, product=("down", "o"), rows=(8, 64, 128, 256, 512, 1024)),
    "decode": [
        *grid(times.decode, rows=(8, 64), splits=(1, 2, 4, 8, 16)),
        *grid(times.decode, rows=(256, 1024), splits=(1, 2)),
        *grid(times.decode, rows=(256,), config=((32, 4, 3), (32, 2, 4), (16, 2, 6), (64, 4, 3))),
        *grid(times.decode, rows=(256, 1024), context=(640,)),
        *grid(times.decode, rows=(256, 1024), shared=(2, 4)),
    ],
    "small": grid(times.small, rows=ROWS),
    "sampler": grid(times.sampler, rows=ROWS, chunk=(4096, 8192)),
    "gemm": grid(times.gemm, product=PRODUCTS, rows=ROWS),
    "prefill": grid(
        times.prefill, prompts=((64, 128), (16, 1024)), config=((64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3))
    ),
}


def run(work: Callable[..., Values], case: Values) -> Values:
    name = " ".join([work.__name__, *(f"{key}={value}" for key, value in case.items())])
    try:
        values = work(**case)
    except Exception:  # noqa: BLE001 - one bad kernel or config must not cost the rest of the run
        values = {"worked": False, "traceback": traceback.format_exc(limit=-4)}
    # "Not below" rather than "above", so that NaN is wrong.
    failed = any(each is False or ("error" in key and not each < MAX_ERROR) for key, each in values.items())
    shown = (f"{key}={each:.4g}" if isinstance(each, float) else f"{key}={each}" for key, each in values.items())
    print(f"{name:60s}", *["FAILED"] * failed, *shown, flush=True)
    return {"name": name, "failed": failed, **values}


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="start nothing new after this long")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    ends, results = time.monotonic() + options.seconds, []
    for section, (work, case) in ((name, each) for name in options.only for each in SECTIONS[name]):
        if time.monotonic() > ends:
            print(f"out of time; left out: {section} from {case} on, and what follows", flush=True)
            break
        results.append({"section": section, **run(work, case)})
        torch.cuda.empty_cache()
        write_record(options.out, DEVICE, results=results)
    sys.exit(any(each["failed"] for each in results))


if __name__ == "__main__":
    main()
