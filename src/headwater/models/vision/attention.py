"""Attention of Qwen's vision towers, whose patches attend to those of the same window or frame.

Unless flash attention is installed, the layers of transformers call an attention function once per window: thousands of
small kernels for a few pictures. Here all windows are computed in one call on CUDA, and in one call per size elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

NAME = "headwater_flash_windows"
"""The layers pass on where windows begin if the name contains ``flash``."""

_TOWER = "visual"


def use_window_attention(model: Any) -> None:
    """Make the vision tower of ``model`` compute all windows together. Other towers have no windows."""
    AttentionInterface.register(NAME, _attend)
    for tower in [each for name, each in model.named_modules() if name.rpartition(".")[2] == _TOWER]:
        # transformers' own setter looks for the flash attention package.
        tower.config._attn_implementation_internal = NAME


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    # [1, heads, patches, head dim] → [patches, heads, head dim]
    # Not by an index, whose gradient is a copy.
    query, key, value = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    return attend_within(query, key, value, cu_seq_lens_q, int(max_length_q), scaling)[None], None


def attend_within(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float) -> Tensor:
    """Attention within parts of ``[patches, heads, head dim]``: every patch attends to all patches of its part.

    ``starts`` are where the parts begin, and the end of the last one. ``longest`` is the size of the largest part.
    """
    if query.is_cuda and value.dtype in (torch.bfloat16, torch.float16):
        query, key, starts = query.to(value.dtype), key.to(value.dtype), starts.to(torch.int32)
        output: Tensor = _varlen_attention()(query, key, value, starts, starts, longest, longest, scale=scale)
        return output
    return _by_size(query, key, value, starts, scale)


def _by_size(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float) -> Tensor:
    """Windows of the same size are computed together, without padding."""
    sizes = starts.diff()
    firsts = starts[:-1]
    output = torch.empty_like(query)
    for size in sorted(set(sizes.tolist())):
        places = firsts[sizes == size, None] + torch.arange(size, device=query.device)
        queries, keys, values = (each[places].transpose(1, 2) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        output = output.index_put((places,), attended.transpose(1, 2))
    return output


@cache
def _varlen_attention() -> Any:
    from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build of torch

    return varlen_attn
