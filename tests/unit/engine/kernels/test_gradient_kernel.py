"""The sum of gradients in half precision."""

from __future__ import annotations

import torch
from engine.kernels.support import HALF, randn

from headwater.learner import gradient_kernels


def test_sums_have_the_bits_of_torch(monkeypatch):
    monkeypatch.setattr(gradient_kernels, "_LEAST", 1000)
    for shape in [(5000,), (4096,), (70, 90)]:
        total, added = randn(*shape), 1e-3 * randn(*shape, dtype=HALF, seed=1)
        expected = total.clone()
        expected += added
        assert gradient_kernels.add_large(total, added)
        assert torch.equal(total, expected)


def test_what_the_kernel_cannot_add_is_left_alone(monkeypatch):
    monkeypatch.setattr(gradient_kernels, "_LEAST", 1000)
    total = randn(40, 40)
    for added in (randn(40, 40), randn(40, 40, dtype=HALF).T, randn(20, 40, dtype=HALF)):
        before = total.clone()
        part = total[: len(added)] if len(added) < 40 else total
        assert not gradient_kernels.add_large(part, added)
        assert torch.equal(total, before)
