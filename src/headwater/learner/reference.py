"""The frozen policy that training is kept near."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headwater.core.data_proto import DataProto
from headwater.learner.engine import ForwardEngine
from headwater.learner.lora import without_adapters


class Reference(Protocol):
    def logprobs(self, batch: DataProto) -> Tensor: ...


class FrozenReference:
    """A model of its own."""

    def __init__(self, engine: ForwardEngine) -> None:
        self.engine = engine

    def logprobs(self, batch: DataProto) -> Tensor:
        return self.engine.compute(batch)["logprobs"]


class AdapterReference:
    """The policy's own model, without its adapters."""

    def __init__(self, engine: ForwardEngine) -> None:
        self._engine = engine

    def logprobs(self, batch: DataProto) -> Tensor:
        with without_adapters(self._engine.module):
            return self._engine.compute(batch)["logprobs"]
