"""The shapes behind ``tiny:<preset>``. Plain numbers: checking a name needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headwater.core.errors import ModelError
from headwater.core.registry import nearest

TINY_PREFIX = "tiny:"


@dataclass(frozen=True, slots=True)
class Preset:
    """A decoder small enough to train on a CPU; ``architecture`` is the transformers model type."""

    architecture: str
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 2048


def _small(architecture: str) -> Preset:
    return Preset(architecture, hidden_size=256, intermediate_size=768, num_layers=6, num_heads=8, num_kv_heads=4)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "qwen3": Preset("qwen3"),
        "qwen2": Preset("qwen2"),
        "llama": Preset("llama"),
        "qwen3-small": _small("qwen3"),
        "llama-small": _small("llama"),
    }
)


def find_preset(path: str) -> Preset:
    """The preset that ``tiny:<name>`` names."""
    name = path.removeprefix(TINY_PREFIX)
    if name not in PRESETS:
        raise ModelError(f"model.path = {path}: unknown preset {name!r}; {nearest(name, sorted(PRESETS))}")
    return PRESETS[name]
