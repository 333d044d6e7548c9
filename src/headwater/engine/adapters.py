"""LoRA adapters beside the frozen weights of a model that generates, not merged into them.

    add_adapters(model, rank=16, alpha=32)           # every linear layer gets ``lora_A`` and ``lora_B``, which is zero
    engine.update_weights(adapters_alone)            # a few megabytes instead of the whole model

The parameters belong to the linear layers, so their names are those of the layers with ``.lora_A`` and ``.lora_B``, and
the names of all other weights do not change. ``FusedDecoder`` adds their products itself; the layers of transformers do
it in a hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.core.errors import ConfigError
from headwater.models.vision import vision_parameter_names

PARTS = ("lora_A", "lora_B")


def is_adapter(name: str) -> bool:
    """Whether a parameter with this name is part of an adapter."""
    return name.rpartition(".")[2] in PARTS


@torch.no_grad()
def add_adapters(model: Any, *, rank: int, alpha: float, targets: Sequence[str] = ()) -> None:
    """Give the linear layers named in ``targets``, or all except the output layer, an adapter that does nothing yet.

    In a vision model these are layers of the language model, unless a name is found only in the vision tower.
    """
    head = model.get_output_embeddings()
    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head]
    of_vision = vision_parameter_names(model)
    of_text = [(name, each) for name, each in layers if f"{name}.weight" not in of_vision]
    chosen = [] if targets else [each for _, each in of_text]
    for target in dict.fromkeys(targets):
        chosen += _named(of_text, target) or _named(layers, target)
    chosen = list(dict.fromkeys(chosen))
    if not chosen:
        raise ConfigError(
            [f"lora.targets = {list(targets)}: the model has no such linear layer; for example {layers[0][0]}"]
        )
    for layer in chosen:
        for part, shape in zip(PARTS, ((rank, layer.in_features), (layer.out_features, rank)), strict=True):
            values = torch.zeros(shape, dtype=layer.weight.dtype, device=layer.weight.device)
            layer.register_parameter(part, nn.Parameter(values, requires_grad=False))
        vars(layer)["lora_scale"] = alpha / rank
        layer.register_forward_hook(_add_product)


def _named(layers: Sequence[tuple[str, nn.Linear]], target: str) -> list[nn.Linear]:
    """The layers whose name, or the end of whose path, is ``target``."""
    return [each for name, each in layers if f".{name}".endswith(f".{target}")]


def _add_product(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    parameters = dict(layer.named_parameters(recurse=False))
    low = F.linear(inputs[0], parameters["lora_A"])
    return output + F.linear(low, parameters["lora_B"]) * float(vars(layer)["lora_scale"])


@dataclass(frozen=True)
class AdapterParts:
    """The adapters of projections that are merged into one."""

    down: Tensor
    """``[sum of ranks, in]``: the input is read once for all of them."""
    ups: tuple[tuple[int, int, Tensor], ...]
    """Of each adapter: the first column of its part of the output, its first row of ``down``, and ``[out, rank]``."""
    scale: float

    @classmethod
    def of(cls, projections: Sequence[Any]) -> AdapterParts | None:
        """The adapters of these layers, whose outputs follow one another. None if they have no adapters."""
        ups: list[tuple[int, int, Tensor]] = []
        downs: list[Tensor] = []
        column, scale = 0, 0.0
        for each in projections:
            if hasattr(each, "lora_A"):
                row = sum(len(down) for down in downs)
                downs.append(each.lora_A)
                ups.append((column, row, each.lora_B))
                scale = float(each.lora_scale)
            column += each.out_features
        if not downs:
            return None
        return cls(_merged(downs), tuple(ups), scale)

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """Add the products of ``x`` to ``output``, in place."""
        low = F.linear(x, self.down).mul_(self.scale)
        for column, row, up in self.ups:
            part = output[:, column : column + len(up)]
            part.add_(F.linear(low[:, row : row + up.shape[1]], up))
        return output


@torch.no_grad()
def _merged(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows. The parameters become views of it, so that updates reach it."""
    if len(parameters) == 1:
        return parameters[0]
    merged = torch.cat([each.detach() for each in parameters])
    for each, part in zip(parameters, torch.split(merged, [len(each) for each in parameters]), strict=True):
        each.data = part
    return merged
