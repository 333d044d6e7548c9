"""The matrix product whose rows do not depend on each other."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import HALF, randn
from torch.nn import functional as F

from headwater.engine.kernels import linear
from headwater.engine.kernels.linear import (
    MatmulConfig,
    has_scaled_tiles,
    invariant_config,
    invariant_linear,
    invariant_parts,
    invariant_slices,
)

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, HALF: {"rtol": 2e-2, "atol": 5e-2}}


def test_invariant_linear():
    for tokens in [1, 70]:
        for dtype in [torch.float32, HALF]:
            with case(tokens, dtype):
                x, weight, bias = (
                    randn(tokens, 80, dtype=dtype),
                    randn(70, 80, dtype=dtype, seed=1),
                    randn(70, dtype=dtype, seed=2),
                )
                expected = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
                torch.testing.assert_close(invariant_linear(x, weight, bias), expected, **TOLERANCE[dtype])


def test_a_row_of_the_invariant_product_does_not_depend_on_the_others():
    for dtype in [torch.float32, HALF]:
        with case(dtype):
            x, weight = randn(70, 80, dtype=dtype), randn(48, 80, dtype=dtype, seed=1)
            whole = invariant_linear(x, weight)
            assert torch.equal(whole[:5], invariant_linear(x[:5], weight))
            for row in (0, 33, 69):
                assert torch.equal(whole[row : row + 1], invariant_linear(x[row : row + 1], weight))


def test_slices_of_a_sum_have_the_same_bits_together_and_apart(monkeypatch):
    monkeypatch.setattr(linear, "_LONG_SUM", 256)
    x, weight = randn(40, 256), randn(48, 256, seed=1)
    assert invariant_slices(256) == 4
    apart = invariant_parts(x, weight)
    assert apart.shape == (4, 40, 48)
    monkeypatch.setattr(linear, "_PROCESSORS", 1)
    together = invariant_parts(x, weight)
    assert together.shape == (1, 40, 48)
    assert torch.equal(together[0], ((apart[0] + apart[1]) + apart[2]) + apart[3])
    torch.testing.assert_close(together[0], (x.double() @ weight.double().T).float(), **TOLERANCE[torch.float32])


def test_slices_depend_on_the_weight_and_tiles_on_the_rows(monkeypatch):
    def config(tokens: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> MatmulConfig:
        return invariant_config(torch.empty(tokens, 1536, dtype=dtype, device="meta"), outputs)

    assert [invariant_slices(inputs) for inputs in (1536, 8960, 18944, 5000)] == [1, 4, 4, 1]
    scaled = [config(tokens, 17920) for tokens in (1, 64, 256, 8192)]
    sizes = [each.block_m * each.block_n for each in scaled]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 1
    assert {each.block_k for each in scaled} == {64}, "or else rows would be summed in different steps"
    assert config(256, 1536).block_m == 64, "few tiles"
    assert config(8192, 17920, torch.float32) == config(1, 17920, torch.float32)
    monkeypatch.setattr(linear, "SCALED_TILES_ON", None)
    assert {config(tokens, 17920) for tokens in (1, 64, 256, 8192)} == {MatmulConfig(64, 128, 64, 4, 5)}


def test_tiles_depend_on_the_rows_only_on_gpus_whose_bits_were_compared(monkeypatch):
    capabilities = {torch.device("cuda", 0): (9, 0), torch.device("cuda", 1): (10, 0), torch.device("cuda", 2): (8, 9)}
    monkeypatch.setattr(linear, "_capability", capabilities.__getitem__)
    assert [has_scaled_tiles(device) for device in capabilities] == [True, False, False]
