"""Several tensors in one piece of memory."""

from __future__ import annotations

import torch

from headwater.models.upload import num_bytes, upload, views

TENSORS = [
    torch.arange(5),
    torch.tensor([True, False, True]),
    torch.randn(3, 7),
    torch.empty(0, 4),
    torch.arange(9, dtype=torch.int32).view(3, 3),
    torch.randn(4, 6)[:, ::2],  # a view that is not contiguous
    torch.tensor(2.5),
]


def test_every_tensor_has_its_own_aligned_part():
    memory = torch.zeros(num_bytes(TENSORS), dtype=torch.uint8)
    parts = views(memory, TENSORS)
    for part, tensor in zip(parts, TENSORS, strict=True):
        part.copy_(tensor)
    for part, tensor in zip(parts, TENSORS, strict=True):
        assert (part.dtype, part.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(part, tensor), "written before its neighbours, and still there"
        if part.numel():  # an empty tensor has no address
            assert (part.data_ptr() - memory.data_ptr()) % 256 == 0


def test_on_a_cpu_nothing_is_copied():
    assert [each.data_ptr() for each in upload(TENSORS, torch.device("cpu"))] == [each.data_ptr() for each in TENSORS]
