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
from torch.distributed.checkpoint.metadata import Metadata

from headwater.core.errors import RunError
from headwater.learner.lora import adapter_alpha
from headwater.learner.names import trained_parameters
from headwater.learner.optimizer import Optimizer
from headwater.learner.ranks import Ranks

_FOLDER = "train"
_ALPHA = "lora_alpha"
_NUM_SHOWN = 3


def save(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Write ``folder/train``: what is trained, and AdamW's state of it."""
    path = folder / _FOLDER
    optimizer.settle()
    try:
        with _quiet():
            state_dict_saver.save(
                _alpha(model) | _state(model, optimizer), checkpoint_id=path, no_dist=ranks.count == 1
            )
    except CheckpointException as error:
        raise RunError(f"{path}: cannot save ({_first_cause(error)}); check free space and permissions") from error


def load(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Read what ``save`` wrote into a model of the same shape, whatever the number of ranks was then and is now.

    A checkpoint of another model, or one with files cut off, is refused before anything is read. Other damage shows
    half-way: weights and averages are then partly overwritten, and model and optimiser must not be used further.
    """
    path = folder / _FOLDER
    metadata = _read_metadata(path)
    held = metadata.state_dict_metadata
    _check_files(path, metadata)
    _check(path, model, held)
    _check_alpha(path, model, held, ranks)
    # A parameter has averages once it had a gradient: none before the first step, and never if nothing reads it.
    optimizer.reset_state([each for name, each in trained_parameters(model) if f"optimizer.{name}.exp_avg" in held])
    state = _state(model, optimizer)
    _read(path, state, ranks, "; the weights are partly overwritten and must not be used further")
    optimizer.num_steps = int(state["num_steps"])


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"num_steps": torch.tensor(optimizer.num_steps)}
    for name, parameter in trained_parameters(model):
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state_of(parameter).items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def _alpha(model: nn.Module) -> dict[str, Tensor]:
    """What adapters are scaled by, which their shapes do not show."""
    alpha = adapter_alpha(model)
    return {} if alpha is None else {_ALPHA: torch.tensor(alpha)}


def _read(path: Path, state: dict[str, Tensor], ranks: Ranks, aftermath: str = "") -> None:
    """Into the tensors of ``state``, in place; ``aftermath`` says what it means if that fails half-way."""
    try:
        with _quiet():
            state_dict_loader.load(state, checkpoint_id=path, no_dist=ranks.count == 1)
    except CheckpointException as error:
        raise _damaged(path, _first_cause(error) + aftermath) from error


def _read_metadata(path: Path) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # pickle and zip raise their own kinds for a damaged file
        raise _damaged(path, _reason(error)) from error


def _check_files(path: Path, metadata: Metadata) -> None:
    """Whether every file is as long as what it holds."""
    for stored in metadata.storage_data.values():
        file, end = path / stored.relative_path, stored.offset + stored.length
        size = file.stat().st_size if file.exists() else 0
        if size < end:
            raise _damaged(path, f"{file.name} has {size} bytes, not {end}")


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


def _check_alpha(path: Path, model: nn.Module, held: Mapping[str, Any], ranks: Ranks) -> None:
    wanted, saved = adapter_alpha(model), _alpha(model)
    if wanted is None or _ALPHA not in held:
        return
    _read(path, saved, ranks)
    was = float(saved[_ALPHA])
    if was != wanted:
        raise RunError(
            f"{path}: saved with lora.alpha = {was:g}, and this run has {wanted:g}, which would make another policy of "
            f"its adapters; resume with lora.alpha={was:g}"
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
