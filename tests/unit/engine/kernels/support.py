"""Where kernel tests run: on a CUDA device, or else in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    assert os.environ.get("TRITON_INTERPRET") == "1", "tests/conftest.py turns Triton's interpreter on"

triton = pytest.importorskip("triton", exc_type=ImportError)

DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
# The interpreter multiplies with numpy, which has no bfloat16, and truncates where a device rounds.
HALF = torch.bfloat16 if ON_CUDA else torch.float16


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


if not ON_CUDA and version(np.__version__) >= (2, 4) and version(triton.__version__) < (3, 9):
    pytest.skip("this Triton's interpreter needs numpy < 2.4", allow_module_level=True)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


class PagedCache:
    """Keys and values of some rows in shuffled pages. Unused entries are NaN, so that reading them is detected."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype) -> None:
        self.lengths, self.page_tokens = lengths, page_tokens
        pages_per_row = [max(1, -(-length // page_tokens)) for length in lengths]
        num_pages = 1 + sum(pages_per_row)
        shape = (num_pages, kv_heads, page_tokens, head_dim)
        self.k = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        self.v = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        ids = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(7))
        self.table = torch.zeros(len(lengths), max(pages_per_row), dtype=torch.int32, device=DEVICE)
        self.keys = [randn(length, kv_heads, head_dim, dtype=dtype, seed=11 + i) for i, length in enumerate(lengths)]
        self.values = [randn(length, kv_heads, head_dim, dtype=dtype, seed=91 + i) for i, length in enumerate(lengths)]
        taken = 0
        for row, count in enumerate(pages_per_row):
            self.table[row, :count] = ids[taken : taken + count].to(torch.int32)
            taken += count
            for position in range(lengths[row]):
                page, offset = int(self.table[row, position // page_tokens]), position % page_tokens
                self.k[page, :, offset] = self.keys[row][position]
                self.v[page, :, offset] = self.values[row][position]


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, window: int = 0) -> torch.Tensor:
    """Causal attention in float64 of the last ``len(q)`` positions: q [queries, heads, dim], keys [length, kv, dim]."""
    q, keys, values = q.double(), keys.double(), values.double()
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    at = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None]
    key_at = torch.arange(len(keys), device=q.device)[None, :]
    visible = key_at <= at
    if window > 0:
        visible &= key_at > at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(dim=-1), values)
