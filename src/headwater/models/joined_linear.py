"""Several linear layers of the same input as one product.

    joined = joined_linear(x, [attention.q_proj, attention.k_proj, attention.v_proj])   # [..., q + k + v]

The forward pass is one product instead of three, and so are the gradients of the input and of the weights. The gradient
of the input is rounded once, where torch rounds one per layer and adds them. If the weights lie one after the other in
memory, as ``learner.working_copies`` places them, they are one matrix already; otherwise they are copied into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def joined_linear(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """The results of ``layers``, one after the other in the last dimension. Either all layers have a bias, or none."""
    parts = [each.weight for each in layers] + [each.bias for each in layers if each.bias is not None]
    result: Tensor = _JoinedLinear.apply(x, len(layers), *parts)  # type: ignore[no-untyped-call]
    return result


def can_be_joined(layers: Sequence[nn.Module | None]) -> TypeGuard[Sequence[nn.Linear]]:
    """Whether these are plain linear layers of the same kind. Layers with adapters are not."""
    plain = [each for each in layers if type(each) is nn.Linear]
    return len(plain) == len(layers) and len({each.bias is None for each in plain}) == 1


def joined(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parts)``, which is a view if they are one after the other in memory already."""
    first = parts[0]
    size = 0
    for each in parts:
        is_next = each.is_contiguous() and each.data_ptr() == first.data_ptr() + size * first.element_size()
        if not is_next or each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        size += each.numel()
    shape = (sum(len(each) for each in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_layers: int, *parts: Tensor) -> Tensor:
        weights, biases = parts[:num_layers], parts[num_layers:]
        # The parts are saved, not their join: they exist anyway, and FSDP frees and gathers their memory.
        ctx.save_for_backward(x, *weights)
        ctx.num_layers = num_layers
        return F.linear(x, joined(weights), joined(biases) if biases else None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        (gradient,) = gradients
        needs_x, _, *needs_parts = ctx.needs_input_grad
        needs_weights, needs_biases = needs_parts[: ctx.num_layers], needs_parts[ctx.num_layers :]
        sizes = [len(each) for each in weights]
        rows = gradient.reshape(-1, gradient.shape[-1])
        x_gradient = (rows @ joined(weights)).view_as(x) if needs_x else None
        of_weights: Sequence[Tensor | None] = [None] * len(needs_weights)
        if any(needs_weights):
            of_weights = torch.split(rows.T @ x.reshape(-1, x.shape[-1]), sizes)
        of_biases: Sequence[Tensor | None] = [None] * len(needs_biases)
        if any(needs_biases):
            of_biases = torch.split(rows.sum(dim=0), sizes)
        found = zip((*of_weights, *of_biases), needs_parts, strict=True)
        return x_gradient, None, *(each if is_needed else None for each, is_needed in found)
