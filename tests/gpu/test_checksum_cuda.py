"""The checksum of weights does not depend on the device that counts it."""

from __future__ import annotations

import pytest
import tiny
import torch

from headwater.models.checksum import checksum


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_same_text_as_on_the_cpu(dtype):
    model = tiny.model()
    here = checksum(model.named_parameters(), dtype)
    assert checksum(model.cuda().named_parameters(), dtype) == here


def test_large_tensors_are_counted_alike_in_chunks():
    tensor = torch.randn(5_000_003, generator=torch.Generator().manual_seed(0))
    assert checksum([("w", tensor.cuda())], torch.bfloat16) == checksum([("w", tensor.to(torch.bfloat16))])
