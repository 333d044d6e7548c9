"""Weights and optimiser state on disk. Each rank writes its shard, and any number of ranks can read them.

``train/`` holds one safetensors file per rank and ``index.json``, which says which part of which tensor each file has.
Neither of them can contain code, so a checkpoint from elsewhere is safe to load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from headwater.core.disk import disk_full
from headwater.core.errors import DamagedCheckpoint, RunError
from headwater.learner.export import trained_parameters
from headwater.learner.held import held_by
from headwater.learner.lora import adapter_alpha
from headwater.learner.optimizer import Optimizer
from headwater.learner.ranks import Ranks
from headwater.models.save import write_safetensors
from headwater.models.sharded_load import first_row

FOLDER = "train"
_INDEX = "index.json"
_FORMAT = "headwater-shards-1"
_NUM_SHOWN = 3
MAPPED_BYTES = 256 * 2**20
"""How much of the files is read before they are opened again. Files are mapped, and what was read of them counts as
memory of the process until they are closed."""


@dataclass(frozen=True)
class ShardPiece:
    """The part of a tensor that one file holds, under the tensor's name."""

    file: str
    start: list[int]
    """The position of the part's first element in the tensor."""
    shape: list[int]


@dataclass(frozen=True)
class _Index:
    """The content of ``index.json``."""

    num_steps: int
    """Optimiser steps so far."""
    has_optimizer: bool
    """Whether AdamW's averages were saved. A parameter has averages only once it had a gradient."""
    lora_alpha: float | None
    """The scale of the adapters, which their shapes do not show; None without adapters."""
    shapes: Mapping[str, list[int]]
    """Of every tensor as a whole."""
    pieces: Mapping[str, list[ShardPiece]]
    loss_scale: Mapping[str, float] | None = None
    """The state of float16's loss scale; None in other types."""

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> _Index:
        try:
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
                raise ValueError(f"{path.name} is not in the format {_FORMAT}")
            pieces = {name: [ShardPiece(**each) for each in parts] for name, parts in content.pop("pieces").items()}
            index = cls(pieces=pieces, **content)
            if index.shapes.keys() != pieces.keys():
                raise ValueError(f"{path.name} does not list the same tensors twice")
            for piece in (each for parts in pieces.values() for each in parts):
                if Path(piece.file).name != piece.file or len(piece.start) != len(piece.shape):
                    raise ValueError(f"{path.name} names the file {piece.file!r}")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _damaged(path.parent, error) from error
        return index


@dataclass(frozen=True)
class Shards:
    """What one rank writes of a checkpoint."""

    file: str
    tensors: Mapping[str, Tensor]
    """The parts of tensors that this rank holds and writes."""
    index: _Index | None
    """What all ranks write. Only the first rank has it."""


def take_shards(model: nn.Module, optimizer: Optimizer, ranks: Ranks, *, with_optimizer: bool = True) -> Shards:
    """The trained weights and, unless ``with_optimizer`` is false, AdamW's state. Nothing is copied yet."""
    optimizer.settle()
    state = dict(_state(model, optimizer if with_optimizer else None))
    file = shard_file(ranks)
    with ranks.together():
        held = {name: tensor for name, tensor in state.items() if writes(tensor, ranks)}
        pieces = {name: piece_of(tensor, file) for name, tensor in held.items()}
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    everywhere = {**{name: [] for name in state}, **gather_pieces(pieces, ranks)}
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.state()
    index = _Index(optimizer.num_steps, with_optimizer, adapter_alpha(model), shapes, everywhere, scale)
    tensors = {name: held_by(tensor) for name, tensor in held.items()}
    return Shards(file, tensors, index if ranks.index == 0 else None)


def shards_to_come(model: nn.Module, ranks: Ranks, *, with_optimizer: bool = True) -> dict[str, Tensor]:
    """For each tensor that ``take_shards`` finds after the first optimiser step, one of the same shape and type."""
    found: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(model):
        found[f"model.{name}"] = parameter
        if with_optimizer:  # AdamW's averages have the type and the shards of their parameter
            state = {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}
            found |= {f"optimizer.{name}.{key}": each for key, each in state.items()}
    return {name: held_by(each) for name, each in found.items() if writes(each, ranks)}


def shard_file(ranks: Ranks) -> str:
    return f"shard_{ranks.index:05d}_of_{ranks.count:05d}.safetensors"


def writes(tensor: Tensor, ranks: Ranks) -> bool:
    """Whether this rank writes a part of the tensor. One that is not split is written by the first rank."""
    return bool(held_by(tensor).numel()) and (ranks.index == 0 or _is_split(tensor))


def piece_of(tensor: Tensor, file: str) -> ShardPiece:
    return ShardPiece(file, _start(tensor), list(held_by(tensor).shape))


def gather_pieces(pieces: Mapping[str, ShardPiece], ranks: Ranks) -> dict[str, list[ShardPiece]]:
    """The pieces of all ranks, by the name of their tensor. All ranks must call it together."""
    everywhere: list[Mapping[str, ShardPiece]] = ranks.gather(dict(pieces))
    names = dict.fromkeys(name for each in everywhere for name in each)
    return {name: [each[name] for each in everywhere if name in each] for name in names}


def read_tensors(
    places: Mapping[str, tuple[Path, str, list[ShardPiece], tuple[int, ...]]],
) -> Iterator[tuple[str, Tensor]]:
    """Put tensors together from the files of several ranks, one at a time. No more than that is in memory.

    ``places`` has, for each name, the folder, the tensor's name in the files, its pieces and its shape.
    """
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        num_read = 0
        for name, (folder, stored, pieces, shape) in places.items():
            if num_read >= MAPPED_BYTES:
                stack.close()
                files.clear()
                num_read = 0
            for piece in pieces:
                if folder / piece.file not in files:
                    files[folder / piece.file] = stack.enter_context(_opened(folder / piece.file))
            there = {piece.file: files[folder / piece.file] for piece in pieces}
            whole = torch.empty(shape, dtype=there[pieces[0].file].get_tensor(stored).dtype)
            _fill_from(whole, stored, pieces, there)
            num_read += whole.nbytes
            yield name, whole


def write_shards(folder: Path, shards: Shards, copies: Mapping[str, Tensor] | None = None) -> None:
    """Write this rank's file of ``folder/train``, and the index if it has it. ``copies`` replace the tensors."""
    path = folder / FOLDER
    write_tensors(path, shards.file, shards.tensors if copies is None else copies)
    if shards.index is not None:
        with _writing(path):
            (path / _INDEX).write_text(shards.index.to_json(), encoding="utf-8")


def save(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks, *, with_optimizer: bool = True) -> None:
    """Write ``folder/train``. If one rank cannot write its file, or the first rank cannot see it, all ranks raise."""
    shards = take_shards(model, optimizer, ranks, with_optimizer=with_optimizer)
    with ranks.together():
        write_shards(folder, shards)
    with ranks.together():
        if shards.index is not None:
            _check_all_here(folder / FOLDER, shards.index)


def _check_all_here(path: Path, index: _Index) -> None:
    """All files of ``index`` are in ``path``. Ranks on other machines may have written to other folders."""
    files = sorted({piece.file for pieces in index.pieces.values() for piece in pieces})
    if missing := [file for file in files if not (path / file).is_file()]:
        more = f" and {len(missing) - _NUM_SHOWN} more" if len(missing) > _NUM_SHOWN else ""
        raise RunError(
            f"{path}: other ranks have written {', '.join(missing[:_NUM_SHOWN])}{more}, but the files are not here, so "
            "the checkpoint is incomplete; run.root must be a folder that the machines of all learner ranks share, "
            "under the same path"
        )


def load(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Read what ``save`` wrote into a model of the same shape. The number of ranks may have changed.

    A checkpoint of another model, or with missing or truncated files, is refused before anything is read. Changed
    bytes are found by the checkpoint's manifest, which the trainer checks before.
    """
    path = folder / FOLDER
    with ranks.together(), ExitStack() as stack:
        index = _Index.read(path / _INDEX)
        files = _open(path, index, stack)
        _check(path, model, index)
        _check_alpha(path, model, index)
        named = trained_parameters(model)
        optimizer.reset_state([each for name, each in named if f"optimizer.{name}.exp_avg" in index.shapes])
        try:
            for name, tensor in _state(model, optimizer):
                _fill(tensor, name, index, files)
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
            raise _damaged(path, f"{error}; the weights are partly overwritten and must not be used") from error
        optimizer.num_steps = index.num_steps
        if optimizer.loss_scale is not None and index.loss_scale is not None:
            optimizer.loss_scale.restore(index.loss_scale)


def read_weights(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The trained weights in ``folder/train`` whose names contain ``prefix``, put together from all files."""
    path = folder / FOLDER
    index = _Index.read(path / _INDEX)
    with ExitStack() as stack:
        files = _open(path, index, stack)
        for name in index.shapes:
            if name.startswith("model.") and prefix in name:
                whole = torch.empty(index.shapes[name], dtype=files[index.pieces[name][0].file].get_tensor(name).dtype)
                _fill(whole, name, index, files)
                yield name.removeprefix("model."), whole


def _state(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in trained_parameters(model):
        yield f"model.{name}", parameter.detach()
        for key, value in optimizer.state_of(parameter).items() if optimizer is not None else ():
            yield f"optimizer.{name}.{key}", value


def _is_split(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.placements != (Replicate(),)


def _start(tensor: Tensor) -> list[int]:
    """The position in the whole tensor of the part that this rank holds."""
    if not isinstance(tensor, DTensor) or not _is_split(tensor):
        return [0] * tensor.ndim
    if tensor.placements != (Shard(0),):
        raise RunError(f"a tensor is sharded as {tensor.placements}; only shards of the first dimension can be saved")
    return [first_row(tensor), *[0] * (tensor.ndim - 1)]


def write_tensors(path: Path, file: str, tensors: Mapping[str, Tensor]) -> None:
    """Write the file of one rank."""
    with _writing(path, sum(each.nbytes for each in tensors.values())):
        path.mkdir(parents=True, exist_ok=True)
        shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        dtypes = {name: each.dtype for name, each in tensors.items()}
        write_safetensors(path / file, shapes, dtypes, tensors.items())


@contextmanager
def _writing(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if (full := disk_full(error, path, "the checkpoint", needed_bytes=needed_bytes)) is not None:
            raise full from error
        raise RunError(f"{path}: cannot save ({error}); check free space and permissions") from error


def _open(path: Path, index: _Index, stack: ExitStack) -> dict[str, Any]:
    """Every file of the index, open. Their headers must agree with the index, and nothing may be missing."""
    files: dict[str, Any] = {}
    try:
        for name, pieces in index.pieces.items():
            for piece in pieces:
                if piece.file not in files:
                    # Opening reads the header and compares it with the file's length.
                    files[piece.file] = stack.enter_context(_opened(path / piece.file))
                if (shape := list(files[piece.file].get_slice(name).get_shape())) != piece.shape:
                    raise ValueError(f"{piece.file} holds {name} as {shape}, not {piece.shape}")
            if sum(math.prod(piece.shape) for piece in pieces) != math.prod(index.shapes[name]):
                raise ValueError(f"{_INDEX} does not name all parts of {name}")
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return files


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        size = f"has {file.stat().st_size} bytes" if file.is_file() else "is missing"
        raise ValueError(f"{file.name} {size}: {_reason(error)}") from error


def _fill(tensor: Tensor, name: str, index: _Index, files: Mapping[str, Any]) -> None:
    """Read the part of ``tensor`` that this rank holds, from all pieces that overlap with it."""
    _fill_from(tensor, name, index.pieces[name], files)


@torch.no_grad()
def _fill_from(tensor: Tensor, name: str, pieces: Sequence[ShardPiece], files: Mapping[str, Any]) -> None:
    held, start = held_by(tensor), _start(tensor)
    for piece in pieces:
        if not held.ndim:
            held.copy_(files[piece.file].get_tensor(name))
            continue
        low = [max(mine, stored) for mine, stored in zip(start, piece.start, strict=True)]
        high = [
            min(mine + length, stored + size)
            for mine, length, stored, size in zip(start, held.shape, piece.start, piece.shape, strict=True)
        ]
        if any(first >= last for first, last in zip(low, high, strict=True)):
            continue
        there = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, piece.start, strict=True))
        here = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, start, strict=True))
        held[here].copy_(files[piece.file].get_slice(name)[there])


def _check(path: Path, model: nn.Module, index: _Index) -> None:
    wanted = {f"model.{name}": tuple(parameter.shape) for name, parameter in trained_parameters(model)}
    weights = {name: tuple(shape) for name, shape in index.shapes.items() if name.startswith("model.")}
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


def _check_alpha(path: Path, model: nn.Module, index: _Index) -> None:
    wanted, was = adapter_alpha(model), index.lora_alpha
    if wanted is not None and was is not None and was != wanted:
        raise RunError(
            f"{path}: saved with lora.alpha = {was:g}, but this run has {wanted:g}, with which the adapters would be a "
            f"different policy; resume with lora.alpha={was:g}"
        )


def _damaged(path: Path, cause: object) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path}: damaged checkpoint ({_reason(cause)}); resume from an older one with --step")


def _reason(cause: object) -> str:
    return str(cause).strip().partition("\n")[0] or type(cause).__name__
