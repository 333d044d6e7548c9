"""The weights of a model that one process holds, converted once per update to the type that its passes compute in.

FSDP converts the weights of every layer in every pass, and gathers and scatters them in a group of one. For a small
model this takes longer than computing. Here all weights are converted together, by a few kernels:

    copies = WorkingCopies(module, torch.bfloat16)
    copies.use()                # the module's parameters are the copies now
    loss(module).backward()
    copies.collect()            # adds the gradients of the copies to those of the weights, in float32
    copies.put_back()           # the module's parameters are the weights again
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_COLLECT_BYTES = 256 * 2**20
"""Gradients of copies that are held before they are added to those of the weights."""


class WorkingCopies:
    """Copies of all floating-point parameters of ``module`` that are not of ``dtype``, which exist only while in use.

    The numbers are those of FSDP with a float32 reduction: a pass computes gradients in ``dtype``, and those of several
    passes are summed in the type of the weights. Joined projections and CUDA graphs, which FSDP does not have,
    round differently.
    """

    keeps_memory: bool = False
    """Copies that are not used keep their memory, so that their addresses stay the same."""

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, neighbours: Iterable[Sequence[nn.Parameter]] = ()
    ) -> None:
        """``neighbours`` are weights whose copies are placed one after the other in memory, in this order."""
        self.dtype = dtype
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        """Where each weight is a parameter; a tied weight has several places."""
        for part in module.modules():
            for name, weight in part._parameters.items():
                if weight is not None and weight.is_floating_point() and weight.dtype != dtype:
                    self._places.setdefault(weight, []).append((part, name))
        for group in neighbours:
            if all(weight in self._places for weight in group):
                for weight in group:
                    self._places[weight] = self._places.pop(weight)  # the last one now
        self._copies = {weight: self._copy_of(weight) for weight in self._places}
        """Always the same objects, which have values only while they are used."""
        self._views: list[Tensor] = []
        """Their memory, while they have any."""
        self._is_used = False
        self._ready: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Weights whose copies have a complete gradient of the present pass."""
        self._ready_bytes = 0

    def _copy_of(self, weight: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(weight.new_empty(0, dtype=self.dtype), requires_grad=weight.requires_grad)
        if copy.requires_grad:
            # Weak: Python's garbage collection does not see what hooks of torch refer to, and would never free it.
            add: Any = weakref.WeakMethod(self._add)
            copy.register_post_accumulate_grad_hook(lambda own: add()(weight, own))  # type: ignore[no-untyped-call]
        return copy

    @torch.no_grad()
    def use(self) -> None:
        """Convert the weights, unless that was done since they were put back, and compute with the copies."""
        if self._is_used or not self._places:
            return
        weights = list(self._places)
        if not self._views:
            self._allocate(weights)
        torch._foreach_copy_(self._views, [weight.data for weight in weights])
        self._is_used = True  # first, so that ``put_back`` also repairs what an interrupt has left half done
        self._place(self._copies)

    def _allocate(self, weights: list[nn.Parameter]) -> None:
        # One allocation for all, in which every copy starts at a multiple of 256 bytes.
        sizes = [-(-weight.numel() // 128) * 128 for weight in weights]
        memory = torch.empty(sum(sizes), dtype=self.dtype, device=weights[0].device)
        self._views = [
            part[: each.numel()].view(each.shape)
            for part, each in zip(torch.split(memory, sizes), weights, strict=True)
        ]
        for weight, view in zip(weights, self._views, strict=True):
            self._copies[weight].data = view

    def put_back(self) -> None:
        """Make the weights the module's parameters again, and free the copies."""
        if not self._is_used:
            return
        self._place({weight: weight for weight in self._places})
        for copy in self._copies.values():
            copy.grad = None
        self._is_used, self._ready, self._ready_bytes = False, [], 0
        if not self.keeps_memory:
            self.free()

    def free(self) -> None:
        """Free the memory of copies that are not used."""
        if self._is_used:
            return
        self._views = []
        for copy in self._copies.values():
            copy.data = copy.new_empty(0)

    def _place(self, parameters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for weight, places in self._places.items():
            for part, name in places:
                part._parameters[name] = parameters[weight]

    def owners(self) -> dict[nn.Parameter, nn.Parameter]:
        """By copy, the weight that it is of."""
        return {copy: weight for weight, copy in self._copies.items()}

    def give(self, gradients: Iterable[tuple[nn.Parameter, nn.Parameter, Tensor]]) -> None:
        """Add gradients that were not computed by torch's backward pass: a weight, its copy and the copy's gradient."""
        for weight, copy, gradient in gradients:
            copy.grad = gradient
            self._ready.append((weight, copy))
        self.collect()

    def _add(self, weight: nn.Parameter, copy: nn.Parameter) -> None:
        assert copy.grad is not None, "a hook that is called when it has one"
        self._ready.append((weight, copy))
        self._ready_bytes += copy.grad.nbytes
        if self._ready_bytes >= _COLLECT_BYTES:
            self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the copies to the gradients of their weights."""
        sums: list[Tensor] = []
        added: list[Tensor] = []
        new: list[Tensor] = []
        converted: list[Tensor] = []
        for weight, copy in self._ready:
            assert copy.grad is not None
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
                new.append(weight.grad)
                converted.append(copy.grad)
            else:
                sums.append(weight.grad)
                added.append(copy.grad)
            copy.grad = None
        if new:
            torch._foreach_copy_(new, converted)
        if sums:
            add_all(sums, added)
        self._ready, self._ready_bytes = [], 0


def add_all(sums: list[Tensor], added: list[Tensor]) -> None:
    """Add to every sum, with the same bits on every path."""
    pairs = list(zip(sums, added, strict=True))
    if sums[0].is_cuda:
        from headwater.learner import gradient_kernels  # Triton needs a GPU

        pairs = [pair for pair in pairs if not gradient_kernels.add_large(*pair)]
        add_small(pairs)
    elif pairs:
        torch._foreach_add_(sums, added)


def add_small(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add to every sum by few kernels. Between different types, torch would launch one for each."""
    if not pairs:
        return
    sums = [total for total, _ in pairs]
    converted = [torch.empty_like(total) for total in sums]
    torch._foreach_copy_(converted, [part for _, part in pairs])
    torch._foreach_add_(sums, converted)
