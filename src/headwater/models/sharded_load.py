"""Loading a model over several ranks: a skeleton without values, and each rank's part of the weight files.

model, files = load_skeleton(AutoModelForCausalLM, folder, torch.float32)
...                                  # shard the model, allocate this rank's part
files.read(parameters, buffers)      # reads only the rows that this rank holds
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from headwater.core.errors import ModelError
from headwater.models import folder as folder_checks


@dataclass(frozen=True)
class ShardReader:
    """The safetensors files of a model folder."""

    file_of: Mapping[str, Path]
    """The file that holds each tensor, by the tensor's name in the model."""
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """The names in the files, by those in the model, of tensors for which they differ."""

    @classmethod
    def of(cls, folder: Path) -> ShardReader | None:
        """The files of ``folder``, or None if its weights are pickled."""
        files = folder_checks.weight_files(folder)
        found: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                found.update(dict.fromkeys(opened.keys(), file))
        return cls(found) if files else None

    def renamed(self, rename: Callable[[str], str]) -> ShardReader:
        """The same files for a model that uses other names. ``rename`` makes them of the names in the files."""
        stored = {rename(name): name for name in self.file_of}
        return ShardReader({name: self.file_of[each] for name, each in stored.items()}, stored)

    @torch.no_grad()
    def read(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Fill ``parameters``, of each the part that this rank holds, and the ``buffers`` that the files contain."""
        wanted = {**parameters, **{name: each for name, each in buffers.items() if name in self.file_of}}
        missing = sorted(wanted.keys() - self.file_of.keys())
        if missing:
            raise ModelError(f"the weight files have no {missing[0]}; save the model again")
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in wanted:
            by_file[self.file_of[name]].append(name)
        for file, names in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    stored = self.stored_names.get(name, name)
                    _fill(wanted[name], opened.get_slice(stored), f"{file}: {stored}")


def _fill(target: Tensor, stored: Any, where: str) -> None:
    shape = tuple(stored.get_shape())
    if shape != tuple(target.shape):
        raise ModelError(f"{where} has shape {shape}, not {tuple(target.shape)}; use the config.json of these weights")
    if not isinstance(target, DTensor):
        target.copy_(stored[...])
        return
    if target.placements != (Shard(0),):
        raise ModelError(f"{where} is sharded as {target.placements}; only shards of the first dimension can be read")
    local = target.to_local()
    start = first_row(target)
    if len(local):
        local.copy_(stored[start : start + len(local)])


def first_row(target: DTensor) -> int:
    """The first row that this rank holds. FSDP gives the ranks equal parts, the last ones shorter or empty."""
    rows = -(-target.shape[0] // target.device_mesh.size())
    return min(target.device_mesh.get_local_rank() * rows, target.shape[0])


def load_skeleton(auto_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model in eval mode whose parameters have shapes but no values. Its buffers are computed as usual."""
    with _parameters_on_meta():
        model = auto_class.from_config(config, dtype=dtype)
    return model.eval()


def named_as_in(model: Any, files: ShardReader) -> ShardReader:
    """``files`` with the names of the model, for architectures of which transformers only changes names.

    Qwen2.5-VL is one: its files have ``visual`` and ``model.layers`` for what is now within ``model``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    changes = get_model_conversion_mapping(model, add_legacy=False)
    if not changes or not all(isinstance(each, WeightRenaming) for each in changes):
        return files

    def rename(name: str) -> str:
        for change in changes:
            name = change.rename_source_key(name)[0]
        return name

    return files.renamed(rename)


def matches(model: Any, files: ShardReader) -> bool:
    """Whether the files hold the model's parameters under the names they have in the model."""
    names = {name for name, _ in model.named_parameters()}
    everything = set(model.state_dict(keep_vars=True))
    return names <= files.file_of.keys() <= everything | names


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put every parameter on the meta device when a module registers it. Buffers keep their values."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
