"""Tiny models with random weights, built offline: the same weights for the same seed, whatever ran before."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen2Config, Qwen3Config

from headwater.models.presets import Preset, find_preset
from headwater.models.tokenizer import END_TOKEN, PAD_TOKEN, SPECIAL_TOKENS, VOCABULARY_SIZE

_CONFIG_CLASSES = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}


def build_model(path: str, *, seed: int) -> Any:
    """The model of ``tiny:<preset>`` in float32 on the CPU; converting it later gives every dtype the same weights."""
    config = build_config(find_preset(path))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would also reset the CUDA generators, which fork_rng(devices=[]) does not put back.
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model.eval()


def build_config(preset: Preset) -> Any:
    return _CONFIG_CLASSES[preset.architecture](
        vocab_size=VOCABULARY_SIZE,
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        num_hidden_layers=preset.num_layers,
        num_attention_heads=preset.num_heads,
        num_key_value_heads=preset.num_kv_heads,
        head_dim=preset.head_dim,
        max_position_embeddings=preset.max_positions,
        tie_word_embeddings=True,
        # The usual 0.02 suits widths in the thousands; at width 128 it needed over twice the steps to learn addition.
        initializer_range=preset.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END_TOKEN),
        pad_token_id=SPECIAL_TOKENS.index(PAD_TOKEN),
    )
