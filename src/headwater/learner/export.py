"""A model's weights under their Hugging Face names, whatever training has wrapped around the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    adapted = {f"{name}.base_layer.weight": layer for name, layer in adapted_layers(model)}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        weight = parameter.detach()
        if name in adapted:
            delta = adapted[name].get_delta_weight(ADAPTER).detach()
            weight = (weight.to(delta.dtype) + delta).to(weight.dtype)
        yield plain_name(name), _in_full(weight)


def _in_full(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names and shapes that ``merged_weights`` yields, without computing them."""
    return {
        plain_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters() if "lora_" not in name
    }
