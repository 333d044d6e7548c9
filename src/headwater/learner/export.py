"""A model's weights under their Hugging Face names, whatever training has wrapped around the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from headwater.core.parcels import Content, Parcel

ADAPTER = "default"
"""The name that peft keeps the adapters under."""

_CHECKPOINTED = "_checkpoint_wrapped_module."


def plain_name(name: str) -> str:
    """A parameter's name in the model before activation checkpointing and adapters were added."""
    return name.replace(_CHECKPOINTED, "").replace(".base_layer.", ".")


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that require a gradient. Names of adapters keep peft's form."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name.replace(_CHECKPOINTED, ""), parameter


def trained_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every trained parameter in full, adapters as they are. All ranks must iterate together."""
    for name, parameter in trained_parameters(model):
        yield name, _in_full(parameter.detach())


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have LoRA adapters, found by their methods so that peft is not imported where it is not used."""
    for name, layer in model.named_modules():
        if hasattr(layer, "enable_adapters") and hasattr(layer, "get_delta_weight"):
            yield name, layer


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight in full, with adapters merged into their layers. All ranks must iterate together."""
    for name, weight in _merged_shards(model):
        yield name, _in_full(weight)


def parcels(model: nn.Module, num_ranks: int, content: Content = "merged") -> list[Parcel]:
    """Which rank holds which part of each tensor that ``merged_weights`` or ``unmerged_weights`` yields."""
    return [
        Parcel(name, tuple(parameter.shape), _starts(parameter, num_ranks))
        for name, parameter in _sent_parameters(model, content)
    ]


def _sent_parameters(model: nn.Module, content: Content) -> Iterator[tuple[str, nn.Parameter]]:
    if content != "merged":
        return unmerged_parameters(model, adapters_alone=content == "adapters")
    return ((plain_name(name), each) for name, each in model.named_parameters() if "lora_" not in name)


def own_pieces(model: nn.Module, rank: int, num_ranks: int, content: Content = "merged") -> Iterator[Tensor]:
    """This rank's part of each parcel, flat. All ranks must iterate together."""
    if content == "merged":
        weights = (weight for _, weight in _merged_shards(model))
    else:
        weights = (parameter.detach() for _, parameter in _sent_parameters(model, content))
    for (_, parameter), weight in zip(_sent_parameters(model, content), weights, strict=True):
        begin, end = _starts(parameter, num_ranks)[rank : rank + 2]
        if not isinstance(weight, DTensor):
            yield weight.reshape(-1)[begin:end]
        elif _is_split(parameter, num_ranks):
            own = weight.redistribute(placements=[Shard(0)]).to_local()
            yield own.reshape(-1)[: end - begin]
        else:
            yield weight.full_tensor().reshape(-1)[begin:end]


def _starts(parameter: Tensor, num_ranks: int) -> tuple[int, ...]:
    """Where each rank's part begins, in elements. A tensor that is not split evenly enough is the first rank's."""
    num_rows = parameter.shape[0] if parameter.dim() else 1
    rows = -(-num_rows // num_ranks)
    starts = tuple(min(rank * rows, num_rows) * (parameter.numel() // max(1, num_rows)) for rank in range(num_ranks))
    if _is_split(parameter, num_ranks):
        return (*starts, parameter.numel())
    return (0, *[parameter.numel()] * num_ranks)


def _is_split(parameter: Tensor, num_ranks: int) -> bool:
    """Whether every rank holds a range of rows that a checksum can count alone."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1 or parameter.device_mesh.size() < num_ranks:
        return False
    rows = -(-parameter.shape[0] // num_ranks) if parameter.dim() else 0
    # Parts begin at multiples of 8 bytes, also in number types of 2 bytes.
    return list(parameter.placements) == [Shard(0)] and rows * (parameter.numel() // parameter.shape[0]) % 4 == 0


def _merged_shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight with adapters merged, sharded as the model is."""
    return ((name, weight) for name, weight, _ in merged_pieces(model))


def merged_pieces(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Every weight as ``_merged_shards`` yields it, and whether it was computed and is not the parameter itself."""
    adapted = {f"{name}.base_layer.weight": layer for name, layer in adapted_layers(model)}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        weight = parameter.detach()
        if name in adapted:
            delta = adapted[name].get_delta_weight(ADAPTER).detach()
            weight = (weight.to(delta.dtype) + delta).to(weight.dtype)
        yield plain_name(name), weight, name in adapted


_ADAPTER_PARTS = {f".lora_A.{ADAPTER}.weight": ".lora_A", f".lora_B.{ADAPTER}.weight": ".lora_B"}
"""The end of an adapter's name in peft, and in an engine."""


def unmerged_parameters(model: nn.Module, *, adapters_alone: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """All weights beside their adapters, or only the adapters, as the embedded engine names them."""
    for name, parameter in model.named_parameters():
        end = next((each for each in _ADAPTER_PARTS if name.endswith(each)), "")
        if end:
            yield plain_name(name.removesuffix(end)) + _ADAPTER_PARTS[end], parameter
        elif not adapters_alone:
            yield plain_name(name), parameter


def unmerged_weights(model: nn.Module, *, adapters_alone: bool) -> Iterator[tuple[str, Tensor]]:
    """The values of ``unmerged_parameters`` in full. All ranks must iterate together."""
    for name, parameter in unmerged_parameters(model, adapters_alone=adapters_alone):
        yield name, _in_full(parameter.detach())


def _in_full(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names and shapes that ``merged_weights`` yields, without computing them."""
    return {
        plain_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters() if "lora_" not in name
    }
