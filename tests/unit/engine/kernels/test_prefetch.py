"""How much each program asks memory for."""

from __future__ import annotations

import pytest
from engine.kernels.support import randn

from headwater.engine.kernels.prefetch import Soon, share_of


@pytest.mark.parametrize("num_programs", [1, 7, 512])
@pytest.mark.parametrize("max_bytes", [100, 4000, 10**9])
def test_the_shares_cover_what_is_wanted(num_programs, max_bytes):
    weight = randn(50, 40)
    wanted, share = share_of(Soon(weight, max_bytes), num_programs)
    assert wanted <= min(weight.numel() * 4, max_bytes)
    assert wanted > min(weight.numel() * 4, max_bytes) - 16
    assert share % 16 == 0, "the instruction takes multiples of 16 bytes"
    assert wanted % 16 == 0
    assert share * num_programs >= wanted


def test_nothing_to_ask_for():
    assert share_of(None, 4) == (0, 0)
