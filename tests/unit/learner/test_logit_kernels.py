"""Statistics of logits and their gradient: the kernels against the plain functions."""

from __future__ import annotations

import pytest
import torch
from engine.kernels.support import DEVICE, randn, triton

from headwater.learner import packed_module
from headwater.learner.logit_kernels import logits_gradient, statistics

assert triton


@pytest.mark.parametrize("size", [50, 2048, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kernels_compute_what_the_plain_functions_do(size, temperature):
    logits = 5 * randn(3, size)
    logits[2, 1] = 90.0  # nearly certain
    targets = torch.tensor([0, size - 1, 1], device=DEVICE)
    expected = packed_module._statistics(logits.clone(), targets, temperature)
    actual = statistics(logits, targets, temperature)
    for ours, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=2e-5, rtol=2e-5)
    upstream = randn(2, 3, seed=1)
    for dtype in (torch.float32, torch.float16):
        inputs = (targets, expected[3], expected[1], *upstream, temperature, dtype)
        ours, plain = logits_gradient(logits, *inputs), packed_module._logits_gradient(logits.clone(), *inputs)
        assert ours.dtype == plain.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(ours, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
def test_what_is_not_a_number_stays_visible():
    for value in (float("nan"), float("inf")):
        logits = randn(2, 300)
        logits[1, 200] = value
        found = statistics(logits, torch.zeros(2, dtype=torch.int64, device=DEVICE), 1.0)
        assert all(each[0].isfinite() and not each[1].isfinite() for each in (found[0], found[1], found[3]))


def test_no_tokens():
    logits, nothing = randn(0, 50), torch.zeros(0, device=DEVICE)
    targets = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert all(len(each) == 0 for each in statistics(logits, targets, 1.0))
    assert logits_gradient(logits, targets, *[nothing] * 4, 1.0, torch.float16).shape == (0, 50)
