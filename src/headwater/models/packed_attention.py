"""Attention over packed sequences, registered with transformers so that its decoder layers call it.

A pack is a single row that contains many sequences one after the other. Its **segments** define the attention mask: the
tokens of a segment attend to its prefix (another part of the pack, such as a prompt that several samples share) and,
causally, to each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from headwater.core.errors import ModelError
from headwater.models.upload import upload

NAME = "headwater_packed"

_REMEDY = "use a Llama, Qwen, Mistral, Gemma or another decoder of transformers that does"

_LAYER_FIELDS = ("layer_types", "layers_block_type")
_PACKED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_LOGIT_FIELDS = (
    "logits_scaling",
    "logit_scale",
    "final_logit_softcapping",
    "logits_soft_cap",
    "lm_head_multiplier",
    "output_multiplier",
)
"""Config fields with which transformers' models change their logits. 1 and None have no effect."""


@dataclass(frozen=True)
class Segments:
    """Consecutive parts of a pack that cover it. Each has a prefix, another part of the pack that it attends to."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    prefix_starts: NDArray[np.int64]
    prefix_lengths: NDArray[np.int64]
    """0 for a segment without a prefix."""

    def key_places(self, segment: int) -> NDArray[np.int64]:
        """The tokens that a segment attends to, in the order of their positions."""
        prefix, start = self.prefix_starts[segment], self.starts[segment]
        own = np.arange(start, start + self.lengths[segment])
        return np.concatenate([np.arange(prefix, prefix + self.prefix_lengths[segment]), own])

    def all_key_places(self) -> NDArray[np.int64]:
        """``key_places`` of all segments, one after the other."""
        lengths = np.stack([self.prefix_lengths, self.lengths], axis=1).reshape(-1)
        starts = np.stack([self.prefix_starts, self.starts], axis=1).reshape(-1)
        # Every part counts up from its start: the position in the result, less where the part begins in it.
        shifts = starts - (np.cumsum(lengths) - lengths)
        places: NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(shifts, lengths)
        return places

    def copies(self) -> Copies:
        """Where the tokens of the pack are in ``all_key_places``."""
        key_lengths = self.prefix_lengths + self.lengths
        first = np.cumsum(key_lengths) - key_lengths
        # Segments cover the pack in order, so that their own tokens, one after the other, are all tokens.
        own = np.arange(self.lengths.sum()) + np.repeat(
            first + self.prefix_lengths - (np.cumsum(self.lengths) - self.lengths), self.lengths
        )
        prefixes = self.prefixes()
        counts, lengths = prefixes.num_readers, prefixes.lengths
        # Prefixes with fewer readers repeat one, which is not counted.
        order = np.argsort(prefixes.read_by, kind="stable")
        number = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        first_keys = first[np.flatnonzero(self.prefix_lengths)[order]]
        readers = np.repeat(first_keys[np.cumsum(counts) - counts, None], counts.max(), axis=1)
        readers[prefixes.read_by[order], number] = first_keys
        steps = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        shared = np.repeat(prefixes.starts, lengths) + steps
        assert (np.diff(shared) > 0).all(), "prefixes are prompts, which do not overlap"
        places = np.concatenate([own[shared, None], np.repeat(readers, lengths, axis=0) + steps[:, None]], axis=1)
        is_counted = np.repeat(np.arange(counts.max() + 1) <= counts[:, None], lengths, axis=0)
        return Copies(*map(torch.from_numpy, (own, shared, places, is_counted)))

    def prefixes(self) -> Prefixes:
        has_prefix = self.prefix_lengths > 0
        starts, lengths = self.prefix_starts[has_prefix], self.prefix_lengths[has_prefix]
        _, first, read_by, num_readers = np.unique(starts, return_index=True, return_inverse=True, return_counts=True)
        assert (lengths == lengths[first][read_by]).all(), "prefixes are prompts, which do not overlap"
        return Prefixes(starts[first], lengths[first], num_readers, read_by)


class Prefixes(NamedTuple):
    """The different prefixes of all segments, in the order of the pack."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_readers: NDArray[np.int64]
    """Segments that have this prefix."""
    read_by: NDArray[np.int64]
    """Of each segment that has a prefix, the index of the prefix."""


class Copies(NamedTuple):
    """The places of tokens in a tensor that holds those of shared prefixes several times."""

    own: Tensor
    """``[tokens]``: of every token, its place in its segment."""
    shared: Tensor
    """The tokens of prefixes."""
    places: Tensor
    """``[shared tokens, places]``: of each of them, the own place and those in front of other segments."""
    counts: Tensor
    """Which of them are different places. Prefixes with fewer readers repeat one."""


class _RepeatPrefixes(torch.autograd.Function):
    """``tensor[key_places]``, whose gradient is a sum over the few copies of a token, in float32 and rounded once.

    The gradient of indexing sorts all places in every layer to find those that are equal.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, key_places: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return tensor.index_select(0, key_places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own, shared, places, counts = ctx.copies
        result = gradient.index_select(0, own)
        parts = gradient.index_select(0, places.flatten()).view(*places.shape, *gradient.shape[1:])
        is_counted = counts.view(*counts.shape, *(1 for _ in gradient.shape[1:]))
        kind = torch.float32 if gradient.dtype.itemsize < 4 else gradient.dtype
        total = parts.masked_fill_(~is_counted, 0.0).sum(dim=1, dtype=kind)
        return result.index_copy_(0, shared, total.to(gradient.dtype)), None, None


def repeat_prefixes(tensor: Tensor, key_places: Tensor, copies: Copies) -> Tensor:
    """The keys or values that all segments attend to, one segment after the other."""
    repeated: Tensor = _RepeatPrefixes.apply(tensor, key_places, copies)  # type: ignore[no-untyped-call]
    return repeated


def gather_rows(tensor: Tensor, places: Tensor) -> Tensor:
    """``tensor[places]``, with a backward pass that always sums repeated rows in the same order."""
    if tensor.is_cuda:
        return tensor[places]
    return tensor.index_select(0, places.flatten()).view(*places.shape, *tensor.shape[1:])


class PackedAttention(Protocol):
    """An implementation of attention over one pack, for one kind of device."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int) -> Tensor:
        """Inputs and output are ``[tokens, heads, head dim]``. A ``window`` of 0 means no sliding window."""
        ...


def packed_attention(segments: Segments, device: torch.device, dtype: torch.dtype) -> PackedAttention:
    if has_varlen_kernel(device, dtype):
        return VarlenAttention(AttentionTables.of(segments, device))
    return BucketedAttention(segments, device)


def has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """The variable-length kernel supports only half precision."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


class AttentionTables(NamedTuple):
    """The segments of a pack as tensors on its device, with the keys of a shared prefix copied once per segment."""

    query_starts: Tensor
    """Of every segment, and the end of the last one."""
    key_starts: Tensor
    longest_query: int
    longest_key: int
    key_places: Tensor | None = None
    """The tokens whose keys are copied; None if no segment has a prefix."""
    copies: Copies | None = None
    """What the backward pass needs to add the gradients of copied keys quickly."""

    @classmethod
    def of(cls, segments: Segments, device: torch.device) -> AttentionTables:
        """For a backward pass too if gradients are enabled."""
        key_lengths = segments.lengths + segments.prefix_lengths
        tensors = [cumulative(segments.lengths), cumulative(key_lengths)]
        if segments.prefix_lengths.any():
            tensors += [torch.from_numpy(segments.all_key_places())]
            tensors += segments.copies() if torch.is_grad_enabled() else []
        query_starts, key_starts, *places = upload(tensors, device)
        longest = int(segments.lengths.max()), int(key_lengths.max())
        key_places = places[0] if places else None
        return cls(query_starts, key_starts, *longest, key_places, Copies(*places[1:]) if places[1:] else None)

    def repeated(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all segments, one segment after the other."""
        if self.key_places is None:
            return key, value
        if self.copies is None:
            return key.index_select(0, self.key_places), value.index_select(0, self.key_places)
        return repeat_prefixes(key, self.key_places, self.copies), repeat_prefixes(value, self.key_places, self.copies)


class VarlenAttention:
    """On CUDA: torch's variable-length kernel."""

    def __init__(self, tables: AttentionTables) -> None:
        self._tables = tables

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int) -> Tensor:
        tables = self._tables
        key, value = tables.repeated(key, value)
        output = _varlen_attention()(
            query,
            key,
            value,
            tables.query_starts,
            tables.key_starts,
            tables.longest_query,
            tables.longest_key,
            scale=scale,
            window_size=(window - 1 if window else -1, 0),
        )
        assert isinstance(output, Tensor)
        return output


@cache
def _varlen_attention() -> Callable[..., Any]:
    """Torch's kernel with grouped-query attention."""
    from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build of torch

    # torch 2.11 has no such argument and supports grouped queries by default.
    has_argument = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if has_argument else varlen_attn


@dataclass(frozen=True)
class _Bucket:
    """Segments with the same shape."""

    queries: Tensor
    """``[segments, query length]``: positions in the pack."""
    keys: Tensor


_LONG = 4096
"""Sequences of this length are computed without a mask. Shorter ones keep their results to the bit."""


class BucketedAttention:
    """On a CPU and in float32: segments of equal shape are computed together, without padding and in few calls."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        shapes: dict[tuple[int, int], list[int]] = {}
        for segment, shape in enumerate(zip(segments.lengths, segments.prefix_lengths, strict=True)):
            shapes.setdefault((int(shape[0]), int(shape[1])), []).append(segment)
        self._buckets: list[_Bucket] = []
        for members in shapes.values():
            keys = np.stack([segments.key_places(each) for each in members])
            length = int(segments.lengths[members[0]])
            queries, uploaded = upload([torch.from_numpy(keys[:, -length:]), torch.from_numpy(keys)], device)
            self._buckets.append(_Bucket(queries, uploaded))
        written = torch.cat([bucket.queries.flatten() for bucket in self._buckets])
        self._place_of_token = torch.empty_like(written)
        self._place_of_token[written] = torch.arange(len(written), device=device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int) -> Tensor:
        outputs = [self._attend(bucket, query, key, value, scale, window) for bucket in self._buckets]
        return gather_rows(torch.cat(outputs), self._place_of_token)

    def _attend(self, bucket: _Bucket, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        (num, num_queries), num_keys = bucket.queries.shape, bucket.keys.shape[1]
        # The mask of a long sequence would take more memory than everything else: 5 GiB for 32,768 tokens.
        is_causal = num_queries == num_keys and num_queries >= _LONG and not window
        visible = None
        if not is_causal:
            visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            visible = visible.tril(num_keys - num_queries)
            if window:
                visible = visible.triu(num_keys - num_queries - window + 1)
        output = F.scaled_dot_product_attention(
            gather_rows(query, bucket.queries).transpose(1, 2),
            gather_rows(key, bucket.keys).transpose(1, 2),
            gather_rows(value, bucket.keys).transpose(1, 2),
            attn_mask=visible,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).reshape(num * num_queries, *query.shape[1:])


def use_packed_attention(model: Any) -> None:
    """Make ``model`` use the ``PackedAttention`` that is passed to its forward call as ``packed_attention``."""
    if not model._supports_attention_backend:
        raise ModelError(
            f"{model.config.model_type}: its layers do not accept an attention function, so it cannot be trained on "
            f"packed sequences; {_REMEDY}"
        )
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise ModelError(
            f"{model.config.model_type}: its decoder does not keep its layers in a list named layers, so they cannot "
            f"be sharded, checkpointed or compiled one by one; {_REMEDY}"
        )
    _check_layers(model)
    _check_logits(model)
    AttentionInterface.register(NAME, attend)
    # A vision tower keeps its attention, which is not causal.
    has_tower = getattr(model.config, "vision_config", None) is not None
    (model.get_decoder() if has_tower else model).set_attn_implementation(NAME)


def _check_layers(model: Any) -> None:
    """Refuse convolutions and recurrent states, which would leak from one sequence of a pack into the next."""
    config = model.config.get_text_config(decoder=True)
    for field in _LAYER_FIELDS:
        others = sorted(set(getattr(config, field, None) or ()) - _PACKED_LAYERS)
        if others:
            raise ModelError(
                f"{config.model_type}: {field} has {', '.join(others)}, but only full_attention and sliding_attention "
                "keep the sequences of a pack separate; use a model that has only such layers"
            )


def _check_logits(model: Any) -> None:
    """Refuse changes to the logits: the learner computes log-probs directly from the output layer."""
    if model.get_output_embeddings() is None:
        return
    config = model.config.get_text_config(decoder=True)
    for field in _LOGIT_FIELDS:
        value = getattr(config, field, None)
        if value not in (None, 1):
            raise ModelError(
                f"{config.model_type}: {field} = {value} changes the logits after the output layer, which the learner "
                "does not support, so its log-probs would be wrong; use a model without it (Llama, Qwen, Mistral)"
            )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_attention: PackedAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What layers call: queries, keys and values are ``[1, heads, tokens, head dim]``."""
    if packed_attention is None:
        raise ModelError(
            f"{module.config.model_type}: its layers do not pass on the arguments of a forward pass, so it cannot be "
            f"trained on packed sequences; {_REMEDY}"
        )
    if query.shape[-1] != value.shape[-1]:
        raise ModelError(
            f"{module.config.model_type}: its values and queries have different widths ({value.shape[-1]} and "
            f"{query.shape[-1]}), which is not supported in packed training; {_REMEDY}"
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(
            f"{module.config.model_type}: packed training does not support attention with a soft cap or sinks"
        )
    # Queries and keys that were rotated in float32 are rounded here, once.
    query, key = query.to(value.dtype), key.to(value.dtype)
    # For transformers a pack is one row of length T: [1, heads, T, head dim]. The gradient of an index would be a copy
    # in another layout, which the layer before would have to copy back; that of ``squeeze`` is a view.
    output = packed_attention(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
    )
    return output[None], None


def cumulative(lengths: NDArray[np.int64]) -> Tensor:
    """Where parts of these lengths begin, and the end of the last one, as the kernel needs it."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
