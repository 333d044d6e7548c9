"""Pages of all layers are copied in one launch."""

from __future__ import annotations

import pytest
import torch
from engine.kernels.support import DEVICE, HALF, randn

from headwater.engine.kernels import paging


@pytest.mark.parametrize(("heads", "tokens", "head_dim"), [(3, 16, 32), (2, 8, 5)])
def test_copied_pages_are_equal_and_others_stay(heads, tokens, head_dim, monkeypatch):
    monkeypatch.setattr(paging, "_COPY_BLOCK", 512)
    monkeypatch.setattr(paging, "_MAX_PAGES", 2)
    before = randn(2, 2, 9, heads, tokens, head_dim, dtype=HALF)
    storage = before.clone()
    sources, targets = torch.tensor([1, 1, 6], device=DEVICE), torch.tensor([4, 8, 0], device=DEVICE)
    paging.copy_pages(storage, sources, targets)
    expected = before.clone()
    expected[:, :, targets] = before[:, :, sources]
    assert torch.equal(storage, expected)
