"""Attention of Qwen's vision towers, over all pictures and windows of a call at once.

Transformers calls an attention function once for every window of every picture: thousands of small kernels in each
layer. A function whose name contains ``flash`` is called once, with the ends of all windows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from headwater.models.packed_attention import varlen_attention

NAME = "headwater_flash_vision"


def use_tower_attention(model: Any) -> None:
    """Make the vision tower of ``model`` use this attention, if it is one of Qwen's."""
    tower = getattr(model.base_model, "visual", None)
    if tower is not None:
        AttentionInterface.register(NAME, _attend)
        # Not by set_attn_implementation, which looks for the package flash-attn because of the name.
        tower.config._attn_implementation = NAME


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """``query``, ``key`` and ``value`` are ``[1, heads, patches, head dim]``. Every patch sees its whole window."""
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    if cu_seq_lens_q is not None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        ends, longest = cu_seq_lens_q.to(torch.int32), int(max_length_q)
        attend = varlen_attention()
        output = attend(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(-1, -1))
    else:
        lengths = [len(query)] if cu_seq_lens_q is None else torch.diff(cu_seq_lens_q).tolist()
        output = _equal_windows(query, key, value, lengths, scaling)
    return output[None], None


def _equal_windows(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float) -> Tensor:
    """Windows of equal length that follow each other are computed together."""
    outputs = []
    start = first = 0
    for number, length in enumerate(lengths):
        if number + 1 < len(lengths) and lengths[number + 1] == length:
            continue
        count = number + 1 - first
        end = start + count * length
        q, k, v = (each[start:end].view(count, length, *each.shape[1:]).transpose(1, 2) for each in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
        start, first = end, number + 1
    return torch.cat(outputs)
