"""Low-rank adapters: a few trained weights beside a frozen model, which stays its own reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.config.schema import LoraConfig
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.learner.names import plain_name

_ADAPTER = "default"


def add_adapters(model: Any, config: LoraConfig, *, seed: int = 0) -> None:
    """Put adapters beside the linear layers of ``model``, in place, and freeze everything else.

    ``seed`` decides the random half of them; the other starts at zero, so that the model is at first what it was.
    """
    try:
        import peft
    except ImportError as error:
        raise HeadwaterError(
            f"lora.rank = {config.rank}: needs the peft package; pip install 'headwater[lora]'"
        ) from error
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets) if config.targets else "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            # peft draws on the CPU and moves the adapters afterwards.
            torch.default_generator.manual_seed(seed)
            peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise ConfigError([f"lora.targets = {list(config.targets)}: {error}"]) from error
    if any(hasattr(layer, "base_layer") for layer in (model.get_output_embeddings(), model.get_input_embeddings())):
        raise ConfigError(
            [
                f"lora.targets = {list(config.targets)}: the embedding and the output layer cannot have adapters; "
                "name layers of the decoder, or none for all of them"
            ]
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it was before it had adapters."""
    layers = [layer for _, layer in _adapted(model)]
    # Not by peft's enable_adapters: it also freezes them, and sharding takes note of what is frozen at its first pass.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight as if the model never had adapters: theirs are added to the layers they stand beside."""
    adapted = {f"{name}.base_layer.weight": layer for name, layer in _adapted(model)}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        weight = parameter.detach()
        if name in adapted:
            delta = adapted[name].get_delta_weight(_ADAPTER).detach()
            weight = (weight.to(delta.dtype) + delta).to(weight.dtype)
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        yield plain_name(name).replace(".base_layer.", "."), whole


def merged_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of ``merged_weights``, without computing them."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            yield plain_name(name).replace(".base_layer.", "."), tuple(parameter.shape)


def adapter_alpha(model: nn.Module) -> float | None:
    """``lora.alpha`` of the model's adapters; None where it has none."""
    return next((float(layer.lora_alpha[_ADAPTER]) for _, layer in _adapted(model)), None)


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    # By what they can do, so that nothing is imported where nothing is adapted.
    for name, layer in model.named_modules():
        if hasattr(layer, "enable_adapters") and hasattr(layer, "get_delta_weight"):
            yield name, layer
