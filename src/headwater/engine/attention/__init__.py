"""Attention over the paged cache, registered with transformers so that its decoder layers call it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

from headwater.engine.kv_cache import KVCache

NAME = "headwater_paged"


class PagedAttention(Protocol):
    """Attention of one forward pass over the paged cache. There is one implementation per device and kind of pass."""

    def __call__(self, layer: int, query: Tensor, *, scale: float, window: int) -> Tensor:
        """Input and output are ``[tokens, heads, head dim]``. Keys and values of these tokens are already stored."""
        ...


def use_paged_attention(model: Any) -> None:
    """Make ``model`` use the ``PagedAttention`` that its forward call receives as ``paged_attention``.

    The vision tower of a model keeps its own attention.
    """
    AttentionInterface.register(NAME, _attend)
    model.get_decoder().set_attn_implementation(NAME)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged_attention: PagedAttention,
    kv_cache: KVCache,
    slots: Tensor,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    # For transformers, all tokens of a pass are one row of length T: [1, heads, T, head dim].
    kv_cache.store(module.layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1), slots)
    output = paged_attention(module.layer_idx, query[0].transpose(0, 1), scale=scaling, window=sliding_window or 0)
    return output[None], None
