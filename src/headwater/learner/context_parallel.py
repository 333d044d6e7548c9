"""Context parallelism: several ranks compute one pack together, each of them a slice of its tokens.

All layers except attention treat every token separately, so a rank needs only its slice. For attention the ranks
exchange heads for tokens: a rank gets all tokens of the pack for its share of the heads, and gives its result back in
the same way (Ulysses). Attention itself does not change, nor do its segments and shared prompts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from headwater.core.errors import ConfigError
from headwater.learner.packing import Pack
from headwater.models.packed_attention import PackedAttention


class Share(NamedTuple):
    """What one rank computes of a pack."""

    pack: Pack
    """A slice of the tokens, and the trained tokens that it predicts. ``segments`` are those of the whole pack."""
    chosen: Tensor
    """The indices of those trained tokens in the whole pack."""


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that compute a pack together. Every method must be called by all of them, with the same pack."""

    mesh: DeviceMesh
    """One dimension of the mesh of all ranks."""

    def __post_init__(self) -> None:
        # On CPUs, DTensor gathers and cuts instead of an all-to-all, and warns about it on every rank.
        logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)

    def check(self, model: Any) -> None:
        """Refuse a model whose heads cannot be divided. Keys and values are repeated where they have too few heads."""
        num_heads = model.config.get_text_config(decoder=True).num_attention_heads
        if num_heads % self.mesh.size():
            raise ConfigError(
                [
                    f"learner.context_parallel = {self.mesh.size()}: this {model.config.model_type} model has "
                    f"{num_heads} attention heads, which must be divisible by it; use one of {_divisors(num_heads)}"
                ]
            )

    def share(self, pack: Pack) -> Share:
        num_tokens = -(-len(pack.input_ids) // self.mesh.size())
        start = self.mesh.get_local_rank() * num_tokens
        end = start + num_tokens
        num_missing = num_tokens * self.mesh.size() - len(pack.input_ids)
        chosen = ((pack.predictors >= start) & (pack.predictors < end)).nonzero()[:, 0]
        own = replace(
            pack,
            input_ids=F.pad(pack.input_ids, (0, num_missing))[start:end],
            position_ids=F.pad(pack.position_ids, (0, num_missing))[..., start:end],
            predictors=pack.predictors[chosen] - start,
            targets=pack.targets[chosen],
            media=None if pack.media is None else pack.media.between(start, end),
        )
        return Share(own, chosen)

    def attention(self, whole: PackedAttention, pack: Pack) -> PackedAttention:
        """Attention on slices of ``pack``, computed by ``whole`` on all of its tokens."""
        return _SharedAttention(whole, len(pack.input_ids), self.mesh)

    def joined(self, outputs: Mapping[str, Tensor], share: Share, pack: Pack) -> dict[str, Tensor]:
        """The outputs of all trained tokens of ``pack``, on every rank. Gradients go back to the rank that computed."""
        own = torch.stack(list(outputs.values()))
        spread = own.new_zeros(len(outputs), len(pack.targets)).index_copy(1, share.chosen, own)
        whole = DTensor.from_local(spread, self.mesh, [Partial()], run_check=False).full_tensor()
        return {name: values.clone() for name, values in zip(outputs, whole, strict=True)}  # FSDP warns about views


class _SharedAttention:
    def __init__(self, whole: PackedAttention, num_tokens: int, mesh: DeviceMesh) -> None:
        """``num_tokens`` are those of the whole pack, without the padding that makes all slices equally long."""
        self._whole = whole
        self._num_tokens = num_tokens
        self._mesh = mesh

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int) -> Tensor:
        num_ranks, num_keys = self._mesh.size(), key.shape[1]
        if num_keys % num_ranks:
            repeats = math.lcm(num_keys, num_ranks) // num_keys
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        parts = [each.reshape(len(each), num_ranks, -1, each.shape[2]) for each in (query, key, value)]
        # One exchange for all three: [own tokens, ranks, heads, head dim] becomes [all tokens, 1, heads, head dim].
        exchanged = self._exchange(torch.cat(parts, dim=2), 0, 1)
        of_heads = torch.split(exchanged[: self._num_tokens, 0], [each.shape[2] for each in parts], dim=1)
        output = self._whole(*of_heads, scale=scale, window=window)
        padded = F.pad(output, (0, 0, 0, 0, 0, len(exchanged) - self._num_tokens))
        return self._exchange(padded[:, None], 1, 0).flatten(1, 2)

    def _exchange(self, tensor: Tensor, split: int, wanted: int) -> Tensor:
        """Split the dimension ``wanted`` over the ranks instead of ``split``: an all-to-all."""
        shared = DTensor.from_local(tensor, self._mesh, [Shard(split)], run_check=False)
        return shared.redistribute(placements=[Shard(wanted)]).to_local()


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
