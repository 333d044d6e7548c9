"""Taking new weights into a model: every tensor, or the update is refused whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headwater.core.errors import WeightsError


@torch.no_grad()
def copy_weights(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy named tensors into ``model``. A missing, unknown or wrongly shaped tensor leaves the model untouched."""
    targets: dict[str, Tensor] = dict(model.named_parameters())
    update = dict(tensors)
    problems = [f"missing {name}" for name in sorted(targets.keys() - update.keys())]
    problems += [f"unknown {name}" for name in sorted(update.keys() - targets.keys())]
    problems += [
        f"{name} has shape {tuple(update[name].shape)}, expected {tuple(target.shape)}"
        for name, target in targets.items()
        if name in update and update[name].shape != target.shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise WeightsError(f"weight update refused, the old weights stay in place: {shown}")
    for name, target in targets.items():
        target.copy_(update[name])
