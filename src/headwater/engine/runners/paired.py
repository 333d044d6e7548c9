"""Chooses where the decoder's products in pairs (``kernels/pair_linear.py``) replace a product and the kernel after it.

Gate and up with SiLU, and q, k, v with rotary embedding and store, each in one kernel. Whether this is faster than
cuBLAS and a second kernel depends on the shape and the number of rows, so it is used only where it was measured to be.
Layers with adapters, whose products are added in between, and heads with norms take the plain path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from headwater.engine.kernels.linear import invariant_config
from headwater.engine.kernels.pair_linear import PairConfig, can_rotate, fits, gated_linear, rotated_linear
from headwater.engine.kv_cache import KVCache
from headwater.engine.runners.decoder import FusedLayer, Projection, Rotary

GATE_UP, QKV = "gate_up", "qkv"
FEWEST_ROWS = 33
"""With fewer rows, reading the weight is the limit."""


@dataclass(frozen=True)
class PairChoice:
    """The tiles for a product of this shape with up to ``most_rows`` rows; without tiles, the plain path is faster."""

    product: str
    outputs: int
    inputs: int
    most_rows: int
    config: PairConfig | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> PairChoice:
        """The inverse of ``asdict``, for a file that ``benchmarks/decode_products.py`` wrote."""
        config = record["config"]
        return cls(**{**record, "config": None if config is None else PairConfig(**config)})

    def record(self) -> dict[str, Any]:
        return asdict(self)


PAIR_CHOICES: tuple[PairChoice, ...] = ()
"""Where products in pairs are faster than cuBLAS and a second kernel, on a GPU of ``_MEASURED_ON``.

Empty until ``benchmarks/rollout_throughput.py`` has measured whole runs with choices. Deterministic mode never uses
them.
"""
_MEASURED_ON = (9, 0)
"""The compute capability (H100 and H200) on which choices are measured. Others may lack the memory for their tiles."""


class MeasuredPairs:
    """Uses the kernels where a choice says so."""

    def __init__(self, choices: Iterable[PairChoice]) -> None:
        self._choices = sorted(choices, key=lambda choice: choice.most_rows)

    @classmethod
    def on(cls, device: torch.device) -> MeasuredPairs | None:
        """Those of ``PAIR_CHOICES``; None if there are none for this GPU."""
        is_measured = bool(PAIR_CHOICES) and torch.cuda.get_device_capability(device) == _MEASURED_ON
        return cls(PAIR_CHOICES) if is_measured else None

    def gated(self, x: Tensor, projection: Projection) -> Tensor | None:
        config = self._config(GATE_UP, x, projection)
        return None if config is None else gated_linear(x, projection.weight, projection.bias, config)

    def rotated(
        self, x: Tensor, layer: FusedLayer, rotary: Rotary, slots: Tensor, cache: KVCache, index: int
    ) -> Tensor | None:
        config = self._config(QKV, x, layer.qkv)
        if config is None or layer.head_norms is not None or not can_rotate(cache.spec.head_dim, config):
            return None
        return rotated_linear(
            x,
            layer.qkv.weight,
            layer.qkv.bias,
            (rotary.cos, rotary.sin),
            rotary.positions,
            slots,
            cache.layer(index),
            cache.spec.num_heads,
            config,
        )

    def _config(self, product: str, x: Tensor, projection: Projection) -> PairConfig | None:
        if len(x) < FEWEST_ROWS or not _is_plain(x, projection):
            return None
        shape = (product, *projection.weight.shape)
        for choice in self._choices:
            if (choice.product, choice.outputs, choice.inputs) == shape and len(x) <= choice.most_rows:
                return choice.config
        return None


class InvariantPairs:
    """Gate, up and SiLU in one kernel for any number of rows, for deterministic mode.

    It is used for all passes of a layer or for none. The tiles follow from the number of rows, never from timings.
    """

    def gated(self, x: Tensor, projection: Projection) -> Tensor | None:
        if not _is_plain(x, projection):
            return None
        config = PairConfig.of(invariant_config(x, len(projection.weight)))
        return gated_linear(x, projection.weight, projection.bias, config)

    def rotated(
        self, x: Tensor, layer: FusedLayer, rotary: Rotary, slots: Tensor, cache: KVCache, index: int
    ) -> Tensor | None:
        return None


def _is_plain(x: Tensor, projection: Projection) -> bool:
    weight = projection.weight
    return projection.adapters is None and x.dtype == weight.dtype and x.element_size() == 2 and fits(x, weight)
