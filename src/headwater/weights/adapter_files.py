"""LoRA adapters as files in peft's format, for engines that load them beside the weights of their model.

    files = written_adapters(update, torch.bfloat16, alpha=32)     # an update of ``weights.publish.AdaptersAlone``
    files.path.parent                                              # the folder that peft and vLLM load
    files.weights                                                  # the frozen weights; None if only adapters came

The frozen weights are a folder of their own, because they stay the same while one version of the adapters follows
another: ``files.over(older)`` has the new adapters and the older weights, and keeps both until it is discarded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwater.core.errors import WeightsError
from headwater.core.protocols import Bucket, WeightUpdate
from headwater.weights.file import FileWeights, clear_leftovers
from headwater.weights.safetensors_files import ADAPTERS

SETTINGS = "adapter_config.json"
_PARTS = (".lora_A", ".lora_B")
_PREFIX = "base_model.model."
"""What peft puts before the names of a model's layers."""


@dataclass(frozen=True)
class AdaptedFiles:
    """A version of the adapters, and the weights that they belong to. A ``WeightFile``, whose path is the adapters'."""

    adapters: FileWeights
    weights: FileWeights | None

    @property
    def path(self) -> Path:
        return self.adapters.path

    def hold(self) -> AdaptedFiles:
        """Keep the files until one more ``discard``."""
        self.adapters.hold()
        if self.weights is not None:
            self.weights.hold()
        return self

    def discard(self) -> None:
        """Remove the files, unless someone else holds them."""
        self.adapters.discard()
        if self.weights is not None:
            self.weights.discard()

    def over(self, older: AdaptedFiles) -> AdaptedFiles:
        """These adapters with the weights of ``older``, which are held once more."""
        assert self.weights is None, "these came with weights"
        return AdaptedFiles(self.adapters, older.weights.hold() if older.weights is not None else None)


def written_adapters(
    update: WeightUpdate, dtype: torch.dtype, *, alpha: float, shared_folder: str = ""
) -> AdaptedFiles:
    """The files with the adapters of an update, and with its weights unless ``update.adapters_alone``.

    They are written now, or were written before for several engines. Discard them later. ``alpha`` is ``lora.alpha``.
    """
    if update.file is not None:
        assert isinstance(update.file, AdaptedFiles), "written for engines that load this format"
        return update.file.hold()
    clear_leftovers(shared_folder)
    frozen = {name: shape for name, shape in update.shapes.items() if not name.endswith(_PARTS)}
    shapes = {_peft_name(name): shape for name, shape in update.shapes.items() if name.endswith(_PARTS)}
    if not shapes:
        raise WeightsError(f"version {update.version}: an update without adapters; publish them beside the weights")
    arrived: dict[str, Tensor] = {}
    adapters: FileWeights | None = None
    weights = FileWeights(frozen, dtype, shared_folder, update.version) if frozen else None
    try:
        stream = _without_adapters(update, dtype, arrived)
        if weights is not None:
            weights.write(stream)
        elif extra := [name for bucket in stream for name, _ in bucket]:
            raise WeightsError(f"{extra[0]}: was not announced")
        texts = {SETTINGS: _settings(shapes, alpha)}
        adapters = FileWeights(shapes, dtype, shared_folder, update.version, name=ADAPTERS, texts=texts)
        adapters.write([list(arrived.items())])
    except BaseException:
        for each in (weights, adapters):
            if each is not None:
                each.discard()
        raise
    return AdaptedFiles(adapters, weights)


def _without_adapters(update: WeightUpdate, dtype: torch.dtype, arrived: dict[str, Tensor]) -> Iterator[Bucket]:
    """The other tensors of every bucket. Adapters are copied to ``arrived``: they are small, and come between them."""
    for bucket in update.buckets:
        for name, tensor in bucket:
            if name.endswith(_PARTS):
                # The tensors of a bucket are valid only until the next one is requested.
                arrived[_peft_name(name)] = tensor.detach().to("cpu", dtype, copy=True)
        yield [(name, tensor) for name, tensor in bucket if not name.endswith(_PARTS)]


def _peft_name(name: str) -> str:
    return f"{_PREFIX}{name}.weight"


def adapted_layers(names: Iterable[str]) -> list[str]:
    """The layers that have adapters, by the names of an update's tensors or of a model's parameters."""
    return sorted(name.removesuffix(_PARTS[0]) for name in names if name.endswith(_PARTS[0]))


def _settings(shapes: Mapping[str, tuple[int, ...]], alpha: float) -> str:
    """``adapter_config.json``. Layers are named by their path, because those of a tower may have the same last part."""
    downs = {name: shape for name, shape in shapes.items() if name.endswith(f"{_PARTS[0]}.weight")}
    ranks = {shape[0] for shape in downs.values()}
    if len(ranks) != 1:
        raise WeightsError(f"adapters of ranks {sorted(ranks)}: peft's format needs one rank for all of them")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ranks.pop(),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(name.removeprefix(_PREFIX).removesuffix(f"{_PARTS[0]}.weight") for name in downs),
        "bias": "none",
        "inference_mode": True,
    }
    return json.dumps(settings, indent=2) + "\n"
