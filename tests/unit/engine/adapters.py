"""A policy with LoRA adapters as far as publishing needs it, for tests on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from headwater.config.schema import EngineConfig
from headwater.core.protocols import Bucket
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.engine.engine import Engine
from headwater.models.load import load_model
from headwater.weights.memory import in_buckets
from headwater.weights.publish import AdaptersAlone, publish

MODEL = "tiny:qwen3"
RANK, ALPHA = 4, 8


class Adapted:
    """A model and the adapters of its linear layers, beside it or merged into it."""

    def __init__(self, dtype: str, device: str, targets: tuple[str, ...] = (), alpha: float = ALPHA) -> None:
        self._scale = alpha / RANK
        self.model = load_model(MODEL, dtype=dtype, device=device, seed=1)
        head = self.model.get_output_embeddings()
        layers = {name: each for name, each in self.model.named_modules() if isinstance(each, nn.Linear)}
        self.layers = {
            name: each
            for name, each in layers.items()
            if each is not head and (not targets or name.rpartition(".")[2] in targets)
        }
        self.adapters: dict[str, torch.Tensor] = {}
        self.train(0)

    def train(self, seed: int) -> None:
        """New values of the adapters."""
        generator = torch.Generator().manual_seed(seed)
        for name, layer in self.layers.items():
            for part, shape in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK))):
                drawn = torch.randn(shape, generator=generator) * 0.1
                self.adapters[f"{name}.lora_{part}"] = drawn.to(layer.weight)

    def _frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, each.detach()) for name, each in self.model.named_parameters())

    def export(self) -> Iterator[Bucket]:
        def merged() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in self._frozen():
                layer = name.removesuffix(".weight")
                if layer in self.layers:
                    up, down = self.adapters[f"{layer}.lora_B"].float(), self.adapters[f"{layer}.lora_A"].float()
                    weight = (weight.float() + up @ down * self._scale).to(weight.dtype)
                yield name, weight

        return in_buckets(merged())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(each.shape) for name, each in self._frozen()}

    def export_unmerged(self, adapters_alone: bool) -> Iterator[Bucket]:
        frozen = [] if adapters_alone else list(self._frozen())
        return in_buckets([*frozen, *self.adapters.items()])

    def unmerged_shapes(self, adapters_alone: bool) -> dict[str, tuple[int, ...]]:
        frozen = {} if adapters_alone else self.shapes()
        return {**frozen, **{name: tuple(each.shape) for name, each in self.adapters.items()}}


def engine(dtype: str, device: str, rank: int = 0, **settings: Any) -> Engine:
    config = EngineConfig(kv_cache_gib=0.02, adapter_rank=rank, **{"adapter_alpha": ALPHA, **settings})
    return Engine.load(MODEL, config, dtype=dtype, device=device, seed=3)


def compared(
    dtype: str, device: str, *, adapter_targets: tuple[str, ...] = (), adapter_alpha: int = ALPHA, **settings: Any
) -> tuple[float, float, float]:
    """Publish twice to an engine with adapters and to one with merged weights, and generate.

    The bytes of the second update over those of the first, and the largest and the mean difference of the log-probs of
    tokens that both have sampled from the same tokens.
    """
    policy = Adapted(dtype, device, adapter_targets, adapter_alpha)
    beside = engine(dtype, device, RANK, adapter_targets=adapter_targets, adapter_alpha=adapter_alpha, **settings)
    merged = engine(dtype, device, **settings)
    alone = AdaptersAlone()
    try:
        sizes = []
        for version in (1, 2):
            policy.train(version)
            publish(policy, merged, version)
            sizes.append(publish(policy, beside, version, adapters=alone).num_bytes)
        params = SamplingParams(max_new_tokens=16, ignore_end=True)
        asked = [ModelRequest(f"r{key}", (5, 6, 7, key + 8), params, key) for key in range(6)]
        pairs = zip(beside.generate(asked), merged.generate(asked), strict=True)
        differences = [each for pair in pairs for each in _apart(*pair)]
        return sizes[1] / sizes[0], max(differences), sum(differences) / len(differences)
    finally:
        beside.close()
        merged.close()


def _apart(one: ModelResponse, other: ModelResponse) -> list[float]:
    """The differences up to the first token that differs."""
    differences = []
    for token, second, logprob, expected in zip(
        one.output_tokens, other.output_tokens, one.output_logprobs, other.output_logprobs, strict=True
    ):
        if token != second:
            break
        differences.append(abs(logprob - expected))
    return differences
