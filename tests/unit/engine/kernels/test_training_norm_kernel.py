"""The norm of a float32 residual stream, forward and backward."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import HALF, randn

from headwater.learner.norm_kernels import add_and_norm


def reference(residual, product, weight, eps):
    total = residual if product is None else residual + product
    normalised = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return total, (weight.float() * normalised).to(weight.dtype)


def test_sum_norm_and_gradients_are_those_of_torch():
    for hidden, dtype, has_product, uses_sum in [
        (64, torch.float32, True, True),
        (96, HALF, True, True),
        (96, HALF, False, True),
        (64, HALF, True, False),
    ]:
        with case(hidden, dtype, has_product, uses_sum):
            residual, weight = randn(1, 7, hidden), 1 + 0.3 * randn(hidden, seed=1)
            product = randn(1, 7, hidden, dtype=dtype, seed=2) if has_product else None
            results = []
            for way in (add_and_norm, reference):
                leaves = [residual.clone(), None if product is None else product.clone(), weight.to(dtype)]
                for each in leaves:
                    if each is not None:
                        each.requires_grad_()
                total, normed = way(*leaves, 1e-5)
                assert (total.dtype, normed.dtype) == (torch.float32, dtype)
                loss = (normed.float() * randn(1, 7, hidden, seed=3)).sum()
                if uses_sum:
                    loss = loss + (total * randn(1, 7, hidden, seed=4)).sum()
                loss.backward()
                results.append([total, normed, *(each.grad for each in leaves if each is not None)])
            for ours, expected in zip(*results, strict=True):
                assert ours.dtype == expected.dtype
                tolerance = 1e-2 if ours.dtype == HALF else 2e-3 if dtype == HALF else 1e-5
                torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def test_a_sum_that_is_not_normed_passes_its_gradient_on():
    residual, product = randn(5, 64).requires_grad_(), randn(5, 64, dtype=HALF, seed=1).requires_grad_()
    total, _ = add_and_norm(residual, product, randn(64, dtype=HALF, seed=2), 1e-5)
    total.sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(residual))
    assert torch.equal(product.grad, torch.ones_like(product))
