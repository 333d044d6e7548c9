"""The weights an engine holds: replaced by updates, and moved to main memory while it sleeps."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.core.errors import BaseMissing
from headwater.core.protocols import WeightUpdate
from headwater.models.checksum import checksum
from headwater.weights.memory import Receiver


class ModelWeights:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._has_all = False
        """An update of all weights has been taken. Adapters alone belong to the weights of such an update."""
        self._parked: dict[str, Tensor] = {}
        self._change = threading.Lock()
        """Held while weights change or move, and while a checksum reads them."""

    def receiver(self, shapes: Mapping[str, tuple[int, ...]], *, adapters_alone: bool = False) -> Receiver:
        """What takes an update of these tensors; ``WeightsError`` if they do not fit the model."""
        if adapters_alone and not self._has_all:
            raise BaseMissing("the engine has not been given the weights that the adapters belong to; send all weights")
        return Receiver(self._model, shapes, adapters_alone=adapters_alone)

    def take(self, receiver: Receiver, update: WeightUpdate) -> None:
        """Copy an update into the model. Its tensors may change again when this returns."""
        with self._change:
            try:
                receiver.take_all(update)
                self._has_all = self._has_all or not update.adapters_alone
            finally:
                self._synchronize()

    def checksum(self) -> str:
        """The checksum of the present weights, awake or asleep. Generation continues meanwhile; an update waits."""
        with self._change:
            return checksum(self._parked.items() or self._model.named_parameters())

    @torch.no_grad()
    def park(self) -> None:
        """Move the weights to main memory and release their memory on the device."""
        if self._device.type == "cpu":
            return  # they are already in main memory
        with self._change:
            for name, parameter in self._model.named_parameters():
                self._parked[name] = parameter.detach().to("cpu", copy=True)
            for parameter in self._model.parameters():
                parameter.untyped_storage().resize_(0)

    @torch.no_grad()
    def unpark(self) -> None:
        """Move the weights back to the device: the same tensors at new addresses."""
        if self._device.type == "cpu":
            return
        with self._change:
            for name, parameter in self._model.named_parameters():
                storage, parked = parameter.untyped_storage(), self._parked[name]
                # Merged weights share one storage, which must reach to the end of the last one.
                needed = (parameter.storage_offset() + parameter.numel()) * parameter.element_size()
                if storage.nbytes() < needed:
                    storage.resize_(needed)
                parameter.copy_(parked)
            self._synchronize()  # a checksum reads them on another stream
            self._parked.clear()  # last, so that waking can be retried if memory runs out

    def _synchronize(self) -> None:
        """Wait for this thread's work. A learner that trains on another stream is not waited for."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
