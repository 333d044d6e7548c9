"""LoRA: a few trained weights beside a frozen model. Without its adapters the model is the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headwater.config.training_schema import LoraConfig
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.learner.export import ADAPTER, adapted_layers
from headwater.learner.freeze import vision_modules


def add_adapters(model: Any, config: LoraConfig, *, seed: int = 0) -> None:
    """Add adapters to the linear layers of ``model``, in place, and freeze everything else.

    ``seed`` determines their random half. The other half starts at zero, so the model's outputs do not change at first.
    The adapters have values even if the model's parameters are still on the meta device.
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
        target_modules=_targets(model, config.targets),
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            # peft draws on the CPU and moves the adapters afterwards.
            torch.default_generator.manual_seed(seed)
            peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError([f"lora.targets = {list(config.targets)}: {error}"]) from error
    if any(parameter.is_meta for parameter in model.parameters()):
        _draw_values(model, seed)
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


def _targets(model: Any, wanted: Sequence[str]) -> list[str] | str:
    """The layers that peft adapts: in a vision model those of the language model, unless others are named.

    A name that both parts have means the language model. The path of a layer of the tower means that layer.
    """
    towers = vision_modules(model)
    if not towers:
        return list(wanted) if wanted else "all-linear"
    seen = {id(layer) for tower in towers for layer in tower.modules()}
    skipped = {id(model.get_output_embeddings())}
    linear = [(name, id(each)) for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    of_text = [name for name, layer in linear if layer not in seen | skipped]
    if not wanted:
        return of_text
    of_vision = [name for name, layer in linear if layer in seen]
    chosen: list[str] = []
    for target in wanted:
        found = [name for name in of_text if _matches(name, target)]
        # An unknown name stays, so that peft refuses it.
        chosen += found or [name for name in of_vision if _matches(name, target)] or [target]
    return chosen


def _matches(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _draw_values(model: nn.Module, seed: int) -> None:
    """Give adapters that peft has put on the meta device the values that they would have had on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for _, layer in adapted_layers(model):
            down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
            # The same draws as peft's: two linear layers, each of which initialises itself, then A again.
            drawn = nn.Linear(down.in_features, down.out_features, bias=False)
            other = nn.Linear(up.in_features, up.out_features, bias=False)
            nn.init.kaiming_uniform_(drawn.weight, a=math.sqrt(5))
            down.weight = drawn.weight
            up.weight = nn.Parameter(torch.zeros_like(other.weight))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Run the model as if it had no adapters."""
    layers = [layer for _, layer in adapted_layers(model)]
    # peft's enable_adapters would also freeze them, and FSDP records at its first pass which parameters are frozen.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_alpha(model: nn.Module) -> float | None:
    """``lora.alpha`` of the model's adapters, or None if the model has no adapters."""
    return next((float(layer.lora_alpha[ADAPTER]) for _, layer in adapted_layers(model)), None)
