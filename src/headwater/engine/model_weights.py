"""The weights an engine holds: replaced whole, or set aside while it sleeps."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.models.checksum import checksum
from headwater.models.weights import apply_weights, checked_weights


class ModelWeights:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._parked: dict[str, Tensor] = {}
        self._change = threading.Lock()
        """Held while weights change or move, and while somebody who reads them wants neither."""

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The update by name; ``WeightsError`` when it does not fit the model."""
        return checked_weights(self._model, tensors)

    def apply(self, update: Mapping[str, Tensor]) -> None:
        """Copy a checked update into the model. Its tensors may change again once this returns."""
        with self._change:
            apply_weights(self._model, update)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def checksum(self) -> str:
        """Of the weights as they are now, awake or asleep. Generation goes on meanwhile; an update waits."""
        with self._change:
            return checksum(self._parked.items() or self._model.named_parameters())

    @torch.no_grad()
    def park(self) -> None:
        """Keep the weights in main memory and give their place on the device back."""
        if self._device.type == "cpu":
            return  # they are in main memory already
        with self._change:
            for name, parameter in self._model.named_parameters():
                self._parked[name] = parameter.detach().to("cpu", copy=True)
            for parameter in self._model.parameters():
                parameter.untyped_storage().resize_(0)

    @torch.no_grad()
    def unpark(self) -> None:
        """Bring the weights back to the device, in the same tensors at other addresses."""
        if self._device.type == "cpu":
            return
        with self._change:
            for name, parameter in self._model.named_parameters():
                storage, parked = parameter.untyped_storage(), self._parked[name]
                # Merged weights share one storage: it must reach to the end of the last of them.
                needed = (parameter.storage_offset() + parameter.numel()) * parameter.element_size()
                if storage.nbytes() < needed:
                    storage.resize_(needed)
                parameter.copy_(parked)
            self._parked.clear()  # only now: should memory run out on the way, waking can be tried again
