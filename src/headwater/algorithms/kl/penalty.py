"""Estimators of the KL divergence from a reference policy, token by token, on samples of the current policy."""

from __future__ import annotations

from torch import Tensor

from headwater.algorithms.log_ratio import bounded
from headwater.core.errors import UnknownName
from headwater.core.registry import nearest

KINDS = ("k1", "abs", "k2", "k3")
"""Each also with a ``+``: that estimator's value with the gradient of k2."""

_MAX_K3 = 10.0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """``d = logp - ref``: k1 is ``d``, abs ``|d|``, k2 ``d²/2``, k3 ``exp(-d) + d - 1`` within ±10.

    As a loss, k1 and k3 have the wrong gradient in expectation and k2 the right one: ``k3+`` reports the
    low-variance value and learns from k2.
    """
    if kind.endswith("+"):
        value, slope = kl_penalty(logprobs, ref_logprobs, kind[:-1]), kl_penalty(logprobs, ref_logprobs, "k2")
        return slope - slope.detach() + value.detach()
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        negative = bounded(-difference)
        return (negative.exp() - negative - 1).clamp(-_MAX_K3, _MAX_K3)
    known = [name + plus for name in KINDS for plus in ("", "+")]
    raise UnknownName(f"unknown KL estimator {kind!r}; {nearest(kind, known)}")
