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
    path = folder / _FOLDER
    optimizer.settle()
    try:
        with _quiet():
            state_dict_saver.save(_state(model, optimizer), checkpoint_id=path, no_dist=ranks.count == 1)
    except CheckpointException as error:
        raise RunError(f"{path}: cannot save ({_first_cause(error)}); check free space and permissions") from error


def load(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Read what ``save`` wrote into a model of the same shape, whatever the number of ranks was then and is now."""
    path = folder / _FOLDER
    held = _read_metadata(path)
    _check(path, model, held)
    # A parameter has averages once it had a gradient: none before the first step, and never if nothing reads it.
    optimizer.reset_state([each for name, each in trained_parameters(model) if f"optimizer.{name}.exp_avg" in held])
    state = _state(model, optimizer)
    try:
        with _quiet():
            state_dict_loader.load(state, checkpoint_id=path, no_dist=ranks.count == 1)
    except CheckpointException as error:
        raise _damaged(path, _first_cause(error)) from error
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
        raise _damaged(path, _reason(error)) from error
    return metadata


def _check(path: Path, model: nn.Module, held: Mapping[str, Any]) -> None:
    wanted = {f"model.{name}": tuple(parameter.shape) for name, parameter in trained_parameters(model)}
    weights = {name: tuple(entry.size) for name, entry in held.items() if name.startswith("model.")}
    problems = [f"has no {name}" for name in sorted(wanted.keys() - weights.keys())]
    problems += [f"holds {name}, which the model does not have" for name in sorted(weights.keys() - wanted.keys())]
    problems += [
        f"holds {name} as {weights[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in weights and weights[name] != shape
    ]
    if problems:
        more = f"; and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise RunError(
            f"{path}: a checkpoint of another model: {'; '.join(problems[:_NUM_SHOWN])}{more}; "
            "resume with the model and the settings it was saved with"
        )


def _damaged(path: Path, cause: str) -> RunError:
    return RunError(f"{path}: damaged checkpoint ({cause}); resume from an older one with --step")


def _first_cause(error: CheckpointException) -> str:
    """What the first rank that failed ran into."""
    return _reason(next(iter(error.failures.values()))[0])


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a single process saves as a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
