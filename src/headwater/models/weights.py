"""Taking new weights into a model: every tensor, or the update is refused whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.core.errors import WeightsError

_NUM_SHOWN = 5


def copy_weights(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy named tensors into ``model``. A missing, unknown or wrongly shaped tensor leaves the model untouched."""
    apply_weights(model, checked_weights(model, tensors))


def checked_weights(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The update by name, known to fit ``model``. Tied weights may be given under each of their names."""
    targets: dict[str, Tensor] = dict(model.named_parameters())
    update, problems = _by_name(tensors)
    for alias, name in _tied_names(model, targets).items():
        given = update.pop(alias, None)
        if given is not None and not _is_same(given, update.setdefault(name, given)):
            problems.append(f"{alias} differs from {name}, of which it is another name")
    problems += [f"missing {name}" for name in sorted(targets.keys() - update.keys())]
    problems += [f"unknown {name}" for name in sorted(update.keys() - targets.keys())]
    problems += [
        f"{name} has shape {tuple(update[name].shape)}, expected {tuple(target.shape)}"
        for name, target in targets.items()
        if name in update and update[name].shape != target.shape
    ]
    problems += [
        f"{name} is {update[name].dtype}" for name in targets if name in update and not update[name].is_floating_point()
    ]
    if not problems:
        problems = [
            f"{name} holds values that are NaN or infinite as {targets[name].dtype}"
            for name in _not_finite(update, targets)
        ]
    if problems:
        more = f"; and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise WeightsError(
            f"weight update refused, the old weights stay in place: {'; '.join(problems[:_NUM_SHOWN])}{more}"
        )
    return update


def _by_name(tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors that can be copied from, and what is wrong with the others."""
    update: dict[str, Tensor] = {}
    problems = []
    for name, tensor in tensors:
        if name in update:
            problems.append(f"{name} is given twice")
        elif not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            problems.append(f"{name} is no tensor with values in memory")
        else:
            update[name] = tensor
    return update, problems


@torch.no_grad()
def _is_same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    is_one = left.data_ptr() == right.data_ptr() and left.stride() == right.stride() and left.dtype == right.dtype
    return is_one or torch.equal(left.to(right), right)


@torch.no_grad()
def _not_finite(update: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> list[str]:
    """Tensors that would turn every token into noise. Looked at together: each look alone would wait for the device."""
    largest = torch._foreach_norm(list(update.values()), ord=torch.inf)
    # As the model will hold them: what is finite in float32 need not be so in float16.
    held = [each.to(targets[name].dtype) for name, each in zip(update, largest, strict=True)]
    is_finite = torch.stack([each.float().to(held[0].device) for each in held]).isfinite()
    return [name for name, finite in zip(update, is_finite.tolist(), strict=True) if not finite]


@torch.no_grad()
def apply_weights(model: Any, update: Mapping[str, Tensor]) -> None:
    """Copy a checked update into the model's own memory: nothing that points there has to be told."""
    names, targets = zip(*model.named_parameters(), strict=True)
    torch._foreach_copy_(list(targets), [update[name] for name in names])


def _tied_names(model: Any, targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that ``named_parameters`` leaves out because they are the same tensor as another one."""
    everything = dict(model.named_parameters(remove_duplicate=False))
    by_identity = {id(tensor): name for name, tensor in targets.items()}
    return {name: by_identity[id(tensor)] for name, tensor in everything.items() if name not in targets}
