"""Attention over a pack whose tables have fixed sizes, where the variable-length kernel cannot run.

    attention = fixed_attention(tables, device, dtype)

The values of the tables are read on the device only, so a recorded pass can be repeated with other segments
(``learner.graphs``). Empty segments may follow the others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.models.packed_attention import (
    AttentionTables,
    PackedAttention,
    VarlenAttention,
    gather_rows,
    has_varlen_kernel,
)


def fixed_attention(tables: AttentionTables, device: torch.device, dtype: torch.dtype) -> PackedAttention:
    return VarlenAttention(tables) if has_varlen_kernel(device, dtype) else GridAttention(tables)


class GridAttention:
    """Computes all segments as if they had the length of the longest one, and masks what they do not have.

    It needs memory for ``segments x longest query x longest key`` scores, so it is for small packs.
    """

    def __init__(self, tables: AttentionTables) -> None:
        self._tables = tables

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int) -> Tensor:
        tables, num_tokens = self._tables, len(query)
        key, value = tables.repeated(key, value)
        query_places, query_lengths = _grid(tables.query_starts, tables.longest_query, num_tokens)
        key_places, key_lengths = _grid(tables.key_starts, tables.longest_key, len(key))
        # Query i of a segment is at the same position as its key i + shift.
        shift = (key_lengths - query_lengths)[:, None, None]
        rows = torch.arange(tables.longest_query, device=query.device)[:, None] + shift
        columns = torch.arange(tables.longest_key, device=query.device)
        visible = (columns <= rows) & (columns < key_lengths[:, None, None])
        if window:
            visible &= columns > rows - window
        # A row that sees nothing would be NaN, in its gradient also. Rows that are not queries see the first key.
        visible |= (columns == 0) & ~visible.any(dim=-1, keepdim=True)
        output = F.scaled_dot_product_attention(
            gather_rows(query, query_places).transpose(1, 2),
            gather_rows(key, key_places).transpose(1, 2),
            gather_rows(value, key_places).transpose(1, 2),
            attn_mask=visible[:, None],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        flat = output.transpose(1, 2).reshape(-1, *query.shape[1:])
        tokens = torch.arange(num_tokens, device=query.device, dtype=tables.query_starts.dtype)
        segments = torch.searchsorted(tables.query_starts, tokens, right=True) - 1
        return gather_rows(flat, segments * tables.longest_query + tokens - tables.query_starts[segments])


def _grid(starts: Tensor, longest: int, num_places: int) -> tuple[Tensor, Tensor]:
    """``[segments, longest]`` places, which continue in other segments where one is shorter, and the lengths."""
    lengths = starts[1:] - starts[:-1]
    places = starts[:-1, None] + torch.arange(longest, device=starts.device)
    return places.clamp(max=num_places - 1), lengths
