"""How much a model computes per token, and how much devices can compute, for the utilisation in metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwater.models.vision.architecture import is_projector, patches_per_token, vision_parameter_names

PEAK_TFLOPS = {
    "B200": 2250.0,
    "B100": 1750.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "GH200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}
"""The datasheets' rates of dense bfloat16 products in 10¹² operations per second, by a part of the device's name."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second that a device can compute; None if that is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(name: str) -> float | None:
    known = [part for part in PEAK_TFLOPS if part in name]
    return 1e12 * PEAK_TFLOPS[max(known, key=len)] if known else None


@dataclass(frozen=True)
class PassFlops:
    """Operations of a forward pass of a decoder. A multiplication and an addition count as two."""

    per_token: float
    """In the layers, for every token that is computed."""
    per_pair: float
    """In attention, for every pair of a token and one that it attends to."""
    per_prediction: float
    """In the output layer, for every token whose log-prob or value is computed."""
    per_media_token: float = 0.0
    """In a vision tower without its attention, for every token that stands for a part of an image or video."""

    @classmethod
    def of(cls, model: Any, layers: nn.ModuleList, num_outputs: int) -> PassFlops:
        """``num_outputs`` is the width of the output layer. Of experts, only those that a token uses count."""
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        num_heads = int(getattr(config, "num_attention_heads", 0))
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // max(1, num_heads))
        num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
        used = (getattr(config, "num_experts_per_tok", None) or 1) / num_experts
        weights = sum(
            each.numel() * (used if ".experts." in name else 1.0)
            for name, each in layers.named_parameters()
            if each.dim() > 1
        )
        return cls(
            per_token=2.0 * weights,
            per_pair=4.0 * len(layers) * num_heads * head_dim,
            per_prediction=2.0 * config.hidden_size * num_outputs,
            per_media_token=_vision_flops(model),
        )


def _vision_flops(model: Any) -> float:
    names = vision_parameter_names(model)
    if not names:
        return 0.0
    num_patches = patches_per_token(model.config)
    weights = ((name, each.numel()) for name, each in model.named_parameters() if name in names and each.dim() > 1)
    return 2.0 * sum(int(count) * (1 if is_projector(name) else num_patches) for name, count in weights)
