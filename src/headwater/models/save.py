"""Writing a model folder: it exists complete or not at all, and weights are streamed into it."""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from headwater.core.disk import disk_full
from headwater.core.errors import HeadwaterError, ModelError
from headwater.models.folder import quiet

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headwater.models.vision.processor import VisionProcessor

_MAX_FILE_BYTES = 5 * 2**30
_INDEX = "model.safetensors.index.json"
_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


@dataclass(frozen=True)
class WeightsToSave:
    """Weights that are saved in place of a model's parameters, one after the other."""

    shapes: Mapping[str, tuple[int, ...]]
    """The names and shapes, in the order in which ``tensors`` yields them."""
    dtypes: Mapping[str, torch.dtype]
    tensors: Iterable[tuple[str, Tensor]]


def save_model(
    model: Any,
    tokenizer: Any,
    folder: Path | str,
    weights: WeightsToSave | None = None,
    processor: VisionProcessor | None = None,
) -> Path:
    """Save in the Hugging Face format. An existing folder is used only if it is empty.

    A vision model is saved with its ``processor``, without which it could not be given pictures.

    ``weights`` are written one tensor at a time, so that no second copy of the model is needed. If the architecture
    stores its weights under other names than the model uses, they are collected first, in main memory.
    """
    from headwater.models.vision import is_vision  # imports torch, which resolving a model's name does not need

    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(
            f"cannot save the model to {target}: it exists and is not empty; remove it or name another folder"
        )
    if processor is None and is_vision(model.config):
        raise ModelError(f"cannot save the vision model to {target} without its processor; pass that of load_processor")
    # Beside the target, because a rename is atomic only within one file system. mkdtemp would make a private folder.
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.partial"
    try:
        temporary.mkdir(parents=True)
        with quiet():
            if weights is None or _is_converted(model):
                model.save_pretrained(temporary, state_dict=None if weights is None else _collected(weights))
            else:
                _save_config(model, temporary)
                _write_weights(temporary, weights)
            tokenizer.save_pretrained(temporary)
            if processor is not None:
                processor.save(temporary)
        if weights is not None:
            _state_dtype(temporary / "config.json", weights)
        _share_weights(temporary)
        os.rename(temporary, target)
    except Exception as error:
        # Before the message is made, which says how much space is free.
        shutil.rmtree(temporary, ignore_errors=True)
        if (shown := _failure(error, target, weights)) is not None:
            raise shown from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _failure(error: Exception, target: Path, weights: WeightsToSave | None) -> HeadwaterError | None:
    """What to show instead of ``error``; None for a bug. A full disk may be an OSError or an error of a library."""
    needed = sum(_num_bytes(weights, name) for name in weights.shapes) if weights is not None else 0
    if (full := disk_full(error, target, "the model", needed_bytes=needed)) is not None:
        return full
    if isinstance(error, (OSError, SafetensorError)):
        return ModelError(f"cannot save the model to {target}: {error}; check free space and permissions")
    if isinstance(error, ValueError):
        return ModelError(f"cannot save the model to {target}: {error}; fix its generation_config.json")
    return None


def _state_dtype(config: Path, weights: WeightsToSave) -> None:
    """Make config.json state the number type of the saved weights, which the model need not have."""
    kinds = {str(weights.dtypes[name]).removeprefix("torch.") for name in weights.shapes}
    content = json.loads(config.read_text(encoding="utf-8"))
    if len(kinds) == 1 and content.get("dtype") not in kinds:
        config.write_text(json.dumps({**content, "dtype": kinds.pop()}, indent=2) + "\n", encoding="utf-8")


def _is_converted(model: Any) -> bool:
    """Whether transformers changes names or tensors of this architecture when it loads them."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _collected(weights: WeightsToSave) -> dict[str, Tensor]:
    """All weights at once. They move to main memory one by one, because a device may not have room for a full model."""
    return {name: tensor.detach().to("cpu", weights.dtypes[name]) for name, tensor in weights.tensors}


def _save_config(model: Any, folder: Path) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_weights(folder: Path, weights: WeightsToSave) -> None:
    """One safetensors file, or several of at most 5 GiB and an index."""
    files: list[list[str]] = [[]]
    room = _MAX_FILE_BYTES
    for name in weights.shapes:
        size = _num_bytes(weights, name)
        if files[-1] and size > room:
            files.append([])
            room = _MAX_FILE_BYTES
        files[-1].append(name)
        room -= size
    tensors = iter(weights.tensors)
    file_of = {}
    for number, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file_of.update(dict.fromkeys(names, file))
        shapes = {name: weights.shapes[name] for name in names}
        write_safetensors(folder / file, shapes, weights.dtypes, tensors)
    if len(files) > 1:
        total = sum(_num_bytes(weights, name) for name in weights.shapes)
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write one file, one tensor at a time. ``tensors`` yields those of ``shapes``, in that order."""
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, shape in shapes.items():
        end = place + math.prod(shape) * dtypes[name].itemsize
        kind = _SAFETENSORS_NAMES[str(dtypes[name]).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = iter(tensors)
        for expected in shapes:
            # An iterator that ends early must not leave a file that is shorter than its header.
            name, tensor = next(left, ("nothing", torch.empty(0)))
            if name != expected or tuple(tensor.shape) != shapes[name]:
                raise ModelError(f"cannot save {name} of shape {tuple(tensor.shape)}: expected {expected}")
            data = tensor.detach().to("cpu", dtypes[name]).contiguous()
            file.write(data.view(-1).view(torch.uint8).numpy().data)


def _num_bytes(weights: WeightsToSave, name: str) -> int:
    return math.prod(weights.shapes[name]) * weights.dtypes[name].itemsize


def _share_weights(folder: Path) -> None:
    """Give the weights the permissions of config.json: safetensors makes its files private to the owner."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)
