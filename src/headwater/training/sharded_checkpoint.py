"""Weights and optimiser on disk, each rank writing its own shard; any number of ranks can read them again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from headwater.core.errors import RunError
from headwater.training.names import trained_parameters
from headwater.training.optimizer import Optimizer
from headwater.training.ranks import Ranks

_FOLDER = "train"
_NUM_SHOWN = 3


def save(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Write ``folder/train``: what is trained, and AdamW's state of it."""
    with _quiet():
        state_dict_saver.save(_state(model, optimizer), checkpoint_id=folder / _FOLDER, no_dist=ranks.count == 1)


def load(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Read what ``save`` wrote into a model of the same shape, whatever the number of ranks was then and is now."""
    path = folder / _FOLDER
    held = _read_metadata(path)
    # A checkpoint from before the first step holds no averages.
    optimizer.reset_state(is_empty=not any(name.startswith("optimizer.") for name in held))
    state = _state(model, optimizer)
    _check(path, state, held)
    try:
        with _quiet():
            state_dict_loader.load(state, checkpoint_id=path, no_dist=ranks.count == 1)
    except CheckpointException as error:  # of every rank that failed, its own error
        raise _damaged(path, next(iter(error.failures.values()))[0]) from error
    optimizer.num_steps = int(state["num_steps"])


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"num_steps": torch.tensor(optimizer.num_steps)}
    for name, parameter in trained_parameters(model):
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state_of(parameter).items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def _read_metadata(path: Path) -> Mapping[str, Any]:
    try:
        metadata: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # pickle and zip raise their own kinds for a damaged file
        raise _damaged(path, error) from error
    return metadata


def _check(path: Path, wanted: Mapping[str, Tensor], held: Mapping[str, Any]) -> None:
    problems = [f"has no {name}" for name in sorted(wanted.keys() - held.keys())]
    problems += [f"holds {name}, which the model does not have" for name in sorted(held.keys() - wanted.keys())]
    problems += [
        f"holds {name} as {tuple(held[name].size)}, not {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in held and tuple(held[name].size) != tuple(tensor.shape)
    ]
    if problems:
        more = f"; and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise RunError(
            f"{path}: a checkpoint of another model: {'; '.join(problems[:_NUM_SHOWN])}{more}; "
            "resume with the model and the settings it was saved with"
        )


def _damaged(path: Path, error: BaseException) -> RunError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return RunError(f"{path}: damaged checkpoint ({reason}); resume from an older one with --step")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a single process saves as a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
