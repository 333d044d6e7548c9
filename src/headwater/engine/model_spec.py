"""The shapes of a model that the engine needs, and which models it supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headwater.core.errors import ModelError
from headwater.models.precision import WIDE_RESIDUAL, has_wide_layers
from headwater.models.vision import SUPPORTED_VISION, is_vision, uses_grid_positions

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text")
"""Model types whose output is tested against ``generate`` of transformers, besides ``SUPPORTED_VISION``."""

FUSED = WIDE_RESIDUAL
"""Model types that the fused decoder runs: pre-norm layers, RMS norm, rotary embeddings in halves, gated SiLU."""

ROPE_TYPES = ("default", "linear", "llama3")
"""Supported rotary embeddings. Others (dynamic, longrope) depend on the length of the sequence: keys in the cache would
become wrong as it grows."""


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a decoder, read from its transformers config."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device
    uses_grid: bool = False
    """Tokens of media have a time, a height and a width as their rotary positions."""

    @classmethod
    def of(cls, model: Any) -> ModelSpec:
        """The spec of a loaded model. Raises ``ModelError`` for a model that the engine does not support."""
        whole, config = model.config, model.config.get_text_config()
        name = whole.name_or_path or whole.model_type
        # The language part of a vision model takes embeddings as they are, which Gemma's layers would scale.
        is_supported = config.model_type in FUSED if is_vision(whole) else whole.model_type in SUPPORTED
        if not is_supported or (is_vision(whole) and whole.model_type not in SUPPORTED_VISION):
            raise ModelError(
                f"{name}: the embedded engine does not support {whole.model_type} models; it supports "
                f"{', '.join((*SUPPORTED, *SUPPORTED_VISION))}; use rollout.backend=hf for this model"
            )
        if getattr(config, "rope_parameters", None) and _rope_type(config) not in ROPE_TYPES:
            raise ModelError(
                f"{name}: the embedded engine does not support {_rope_type(config)!r} rotary embeddings; it supports "
                f"{', '.join(ROPE_TYPES)}; use rollout.backend=hf for this model"
            )
        if getattr(config, "final_logit_softcapping", None):
            raise ModelError(
                f"{name}: the embedded engine does not support final_logit_softcapping = "
                f"{config.final_logit_softcapping}; use rollout.backend=hf for this model"
            )
        return cls(
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            dtype=model.dtype,
            device=model.device,
            uses_grid=is_vision(whole) and uses_grid_positions(whole),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def can_fuse(config: Any) -> bool:
    """Whether ``FusedDecoder`` supports this config."""
    return has_wide_layers(config)


def _rope_type(config: Any) -> str:
    parameters = config.rope_parameters
    kinds = {each["rope_type"] for each in parameters.values() if isinstance(each, dict)} or {parameters["rope_type"]}
    return next((kind for kind in sorted(kinds) if kind not in ROPE_TYPES), "default")
