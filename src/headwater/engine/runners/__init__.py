"""Selects the runner for a device and mode."""

from __future__ import annotations

from typing import Any

from headwater.engine.kv_cache import KVCache
from headwater.engine.model_spec import ModelSpec
from headwater.engine.rows import DecodeRows
from headwater.engine.runners.decoder import CpuOps
from headwater.engine.runners.fixed_rows import FixedRowsRunner
from headwater.engine.runners.plain import Runner


def make_runner(
    model: Any, spec: ModelSpec, cache: KVCache, rows: DecodeRows, *, deterministic: bool, stream: Any = None
) -> Runner:
    """``stream`` is the CUDA stream on which ``cache`` and ``rows`` were made; None is the current one."""
    if spec.device.type == "cuda":
        # Needs Triton, which only CUDA builds of torch install.
        from headwater.engine.runners.cuda import CudaRunner

        return CudaRunner(model, spec, cache, rows, deterministic=deterministic, stream=stream)
    if deterministic:
        runner = FixedRowsRunner(model, spec, cache, rows, CpuOps())
        runner.check()
        return runner
    return Runner(model, spec, cache, rows, CpuOps())
