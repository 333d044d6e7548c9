"""Weights and optimiser state on disk. Each rank writes its shard, and any number of ranks can read them."""

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
from headwater.learner.export import trained_parameters
from headwater.learner.lora import adapter_alpha
from headwater.learner.optimizer import Optimizer
from headwater.learner.ranks import Ranks

_FOLDER = "train"
_ALPHA = "lora_alpha"
_NUM_SHOWN = 3


def save(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Write ``folder/train``: the trained weights and AdamW's state."""
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
    """Read what ``save`` wrote into a model of the same shape. The number of ranks may have changed.

    A checkpoint of another model, or with truncated files, is refused before anything is read. Other damage is found
    while reading: weights and averages are then partly overwritten, and the model must not be used any more.
    """
    path = folder / _FOLDER
    metadata = _read_metadata(path)
    held = metadata.state_dict_metadata
    _check_files(path, metadata)
    _check(path, model, held)
    _check_alpha(path, model, held, ranks)
    # A parameter has averages only once it had a gradient.
    optimizer.reset_state([each for name, each in trained_parameters(model) if f"optimizer.{name}.exp_avg" in held])
    state = _state(model, optimizer)
    _read(path, state, ranks, "; the weights are partly overwritten and must not be used")
    optimizer.num_steps = int(state["num_steps"])


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"num_steps": torch.tensor(optimizer.num_steps)}
    for name, parameter in trained_parameters(model):
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state_of(parameter).items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def _alpha(model: nn.Module) -> dict[str, Tensor]:
    """The scale of the adapters, which their shapes do not show."""
    alpha = adapter_alpha(model)
    return {} if alpha is None else {_ALPHA: torch.tensor(alpha)}


def _read(path: Path, state: dict[str, Tensor], ranks: Ranks, aftermath: str = "") -> None:
    """Read into the tensors of ``state``, in place. ``aftermath`` is added to the error if that fails."""
    try:
        with _quiet():
            state_dict_loader.load(state, checkpoint_id=path, no_dist=ranks.count == 1)
    except CheckpointException as error:
        raise _damaged(path, _first_cause(error) + aftermath) from error


def _read_metadata(path: Path) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # pickle and zip raise various errors for a damaged file
        raise _damaged(path, _reason(error)) from error


def _check_files(path: Path, metadata: Metadata) -> None:
    """Refuse files that are shorter than their contents."""
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
            f"{path}: saved with lora.alpha = {was:g}, but this run has {wanted:g}, with which the adapters would be a "
            f"different policy; resume with lora.alpha={was:g}"
        )


def _damaged(path: Path, cause: str) -> RunError:
    return RunError(f"{path}: damaged checkpoint ({cause}); resume from an older one with --step")


def _first_cause(error: CheckpointException) -> str:
    """The error of the first rank that failed."""
    return _reason(next(iter(error.failures.values()))[0])


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning that a single process saves without torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
