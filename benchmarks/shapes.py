"""Models of well-known shapes with random weights, and prompts for them, shared by the rollout benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from headwater.core.protocols import Bucket
from headwater.core.requests import ModelRequest, SamplingParams, derive_key
from headwater.weights.memory import in_buckets

SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "smollm2", "tiny")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def build_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        if shape == "qwen2.5-1.5b":
            config: Any = Qwen2Config(
                vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                num_attention_heads=12, num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6}, dtype=dtype,
            )  # fmt: skip
            model: Any = Qwen2ForCausalLM(config)
        elif shape == "qwen2.5-0.5b":
            config = Qwen2Config(
                vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6}, dtype=dtype,
            )  # fmt: skip
            model = Qwen2ForCausalLM(config)
        elif shape == "qwen2.5-7b":
            config = Qwen2Config(
                vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6}, dtype=dtype,
            )  # fmt: skip
            model = Qwen2ForCausalLM(config)
        elif shape == "smollm2":
            config = LlamaConfig(
                vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 1e5}, dtype=dtype,
            )  # fmt: skip
            model = LlamaForCausalLM(config)
        else:
            config = Qwen2Config(
                vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, dtype=dtype,
            )  # fmt: skip
            model = Qwen2ForCausalLM(config)
    return model.to(dtype).eval()


def make_prompts(num: int, length: int, vocabulary: int, seed: int = 1) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, vocabulary, (num, length), generator=generator)
    return [tuple(row) for row in tokens.tolist()]


def make_requests(
    prompts: list[tuple[int, ...]], samples: int, new_tokens: int, run: int = 0, **settings: Any
) -> list[ModelRequest]:
    """``samples`` requests per prompt that all make exactly ``new_tokens``, unless a stop string comes.

    ``settings`` are further fields of ``SamplingParams``.
    """
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, ignore_end=True, **settings)
    return [
        ModelRequest(f"{run}/{place}/{sample}", prompt, sampling, derive_key(run, place, sample))
        for place, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


class WeightsInMemory:
    """The weights of a learner that is not there (``WeightSource``)."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def export(self) -> Iterator[Bucket]:
        return in_buckets(self._tensors.items())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
