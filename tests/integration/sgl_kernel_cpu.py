"""What ``import sgl_kernel`` finds in the environment of the SGLang server in tests (see ``make setup-sglang``).

The package ``sglang-kernel`` is compiled for GPUs. For CPUs, it would have to be built from SGLang's source code.
Without it, SGLang computes models with torch, but cannot start: it asks for two functions whatever it computes with,
and imports names of others, which belong to speculative decoding and to Qwen3.5, whose module it imports for all Qwen
models with images. ``init_cpu_threads_env`` binds threads to cores and
``initialize`` opens memory that several workers share. Nothing depends on them here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("sgl_kernel", "DEF")
_LIBRARY.define("init_cpu_threads_env(str cpu_ids) -> str")
_LIBRARY.define("initialize(int size, int rank) -> ()")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _LIBRARY.define(f"{_name}(Tensor input) -> Tensor")  # without a function: a call is an error


def _bind_no_threads(cpu_ids: str) -> str:
    return ""


def _share_no_memory(size: int, rank: int) -> None:
    assert size == 1, "several workers need the compiled package"


_LIBRARY.impl("init_cpu_threads_env", _bind_no_threads, "CompositeExplicitAutograd")
_LIBRARY.impl("initialize", _share_no_memory, "CompositeExplicitAutograd")


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: the tests run SGLang without its compiled package")

    return missing
