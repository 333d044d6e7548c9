"""Passes over small packs as CUDA graphs: one call launches all kernels of a forward or a backward pass.

With few tokens, Python takes longer to launch the kernels of a pass than the GPU takes to compute them. Such a pack is
filled up to one of a few shapes (``fixed_pack``). The pass of each shape is recorded once and then repeated:

    graphs = PassGraphs(module, device, CudaRecorder(device))
    pack = graphs.filled(pack, pack.to(device))   # a FilledPack, or the pack itself if it is too large
    outputs = graphs(pack)                      # like module(pack), valid until the next pass
    loss(outputs).backward()                    # gradients are where module(pack) would have them

The loss is not recorded. Which kernels compute a pack depends on the pack and the settings alone, not on what was
computed before, so a resumed run has the same numbers.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from headwater.config.schema import LearnerConfig
from headwater.learner.export import adapted_layers
from headwater.learner.fixed_pack import FilledPack, FixedInputs, PassShape
from headwater.learner.graph_recorder import Action, CudaRecorder, PassRecorder
from headwater.learner.packed_module import PackedModule
from headwater.learner.packing import Pack
from headwater.models.grid_attention import fixed_attention
from headwater.models.memory_sizes import GRAPHS_SHARE, ModelSize
from headwater.models.packed_attention import has_varlen_kernel
from headwater.models.upload import num_bytes, upload_into, views

logger = logging.getLogger(__name__)

_MOST_GRAPHS = 48
"""Passes that are kept. The one that was not used for the longest time is discarded first."""
_MOST_TOKENS = 16384
_MOST_WORK = 3e11
"""Tokens times weights of a layer. With more, a GPU computes a layer for longer than its kernels take to launch."""
_COARSE_WORK = 2e10
"""The same. With less, computing a pack that is filled up to twice its size takes milliseconds more. Recording a pass
of another shape takes 0.2 s, and responses of different lengths would need that in every second step for a while."""
_SCORES = 3
"""Values for every pair of a query and a key of ``GridAttention``: mask, probabilities and their gradient."""

_Given = tuple[list[tuple[nn.Parameter, nn.Parameter, Tensor]], list[tuple[nn.Parameter, Tensor]]]


class PassGraphs:
    """The recorded passes of one module on one device."""

    def __init__(
        self, module: PackedModule, device: torch.device, recorder: PassRecorder, *, most_bytes: int | None = None
    ) -> None:
        """``most_bytes`` is the memory that a pass may need by estimate; None does not limit it."""
        self._module = module
        self._device = device
        self._recorder = recorder
        self._most_bytes = most_bytes
        self._passes: OrderedDict[tuple[PassShape, bool, bool], _Pass] = OrderedDict()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        """Where every recorded backward pass leaves the gradients of the weights."""
        self._addresses: tuple[int, ...] = ()
        self._weights = _Weights(module)
        self._is_off = False
        self._num_runs = 0
        self._largest = 0
        """The most bytes that one of the recorded passes needs by estimate."""

    @classmethod
    def of(cls, module: PackedModule, config: LearnerConfig, num_ranks: int, device: torch.device) -> PassGraphs | None:
        """The graphs of a module that ``ranks.shard`` has prepared; None if its passes cannot be recorded."""
        is_plain = num_ranks == 1 and not isinstance(module, FSDPModule) and module.processor is None
        # Layers that are recomputed save and restore the state of random numbers, and memory is short there. Weights
        # that leave the device return to other addresses.
        is_fixed = not (config.compile or config.checkpoint_activations or config.offload_during_rollout)
        if config.cuda_graphs == "off" or device.type != "cuda" or not is_plain or not is_fixed:
            return None
        if not _Weights.are_known(module):
            logger.info("passes are computed without CUDA graphs: the sizes of this model are not known")
            return None
        most_bytes = int(GRAPHS_SHARE * torch.cuda.get_device_properties(device).total_memory)
        return cls(module, device, CudaRecorder(device), most_bytes=most_bytes)

    @property
    def num_kept(self) -> int:
        return len(self._passes)

    @property
    def num_bytes(self) -> int:
        """Memory of the device that the recorded passes hold, with the gradients that they leave."""
        return self._recorder.num_bytes + sum(each.nbytes for each in self._gradients.values())

    def filled(self, pack: Pack, on_device: Pack) -> Pack:
        """``pack``, filled up; the pack ``on_device`` as it is if it is to be computed without a graph."""
        if self._is_off or pack.media is not None or pack.position_ids.ndim > 1:
            return on_device
        is_coarse = len(pack.input_ids) * self._weights.per_layer < _COARSE_WORK
        shape = PassShape.of(pack, has_gradient=torch.is_grad_enabled(), is_coarse=is_coarse)
        is_large = shape.num_tokens > _MOST_TOKENS or shape.num_tokens * self._weights.per_layer > _MOST_WORK
        has_room = self._most_bytes is None or self._num_bytes(shape) <= self._most_bytes
        if is_large or not has_room:
            return on_device
        return FilledPack(**vars(on_device), shape=shape, inputs=FixedInputs.of(pack, shape))

    def __call__(self, pack: FilledPack) -> Mapping[str, Tensor] | None:
        """The outputs of the module. None if they could not be recorded, which is tried once only."""
        if self._module.copies is not None:
            self._module.copies.use()
        try:
            recorded = self._recorded(pack)
        except RuntimeError as error:  # also of CUDA, of a compiler, and too little memory
            logger.warning("passes are computed without CUDA graphs, because recording one failed: %s", error)
            if self._module.copies is not None:
                self._module.copies.keeps_memory = False  # they are in use, and freed when they are put back
            self.forget()
            self._is_off = True
            return None
        recorded.load(pack.inputs)
        self._num_runs += 1
        if torch.is_grad_enabled():
            anchor = torch.zeros((), requires_grad=True)  # without it, torch would not call the backward pass
            made = _Replay.apply(anchor, self, recorded, self._num_runs)  # type: ignore[no-untyped-call]
        else:
            recorded.run_forward()
            made = tuple(recorded.outputs.values())
        return {name: each[: len(pack.targets)] for name, each in zip(recorded.outputs, made, strict=True)}

    def forget(self) -> None:
        """Discard all graphs and their memory, before weights leave the device."""
        self._discard()
        self._gradients = {}
        if self._module.copies is not None:
            self._module.copies.free()

    def backward(self, recorded: _Pass, number: int) -> None:
        """Repeat the backward pass and add its gradients to those of the weights."""
        if number != self._num_runs:
            raise RuntimeError(
                "the backward pass of a CUDA graph came after the forward pass of another pack, which has overwritten "
                "its activations; compute the passes one after the other"
            )
        recorded.run_backward()
        if recorded.given is None:
            recorded.given = self._given(recorded.reached)
        of_copies, of_weights = recorded.given
        if self._module.copies is not None:
            self._module.copies.give(of_copies)
        for weight, gradient in of_weights:
            if weight.grad is None:
                weight.grad = gradient.clone()
            else:
                weight.grad += gradient

    def _given(self, reached: Sequence[nn.Parameter]) -> _Given:
        """Gradients of working copies, with the weights that they are of, and those of weights that have no copy."""
        copies = self._module.copies
        owners = {} if copies is None else copies.owners()
        of_copies = [(owners[each], each, self._gradients[each]) for each in reached if each in owners]
        return of_copies, [(each, self._gradients[each]) for each in reached if each not in owners]

    def _recorded(self, pack: FilledPack) -> _Pass:
        addresses = self._weights.addresses()
        if addresses != self._addresses:
            self._discard()
            self._addresses = addresses
        has_gradient = torch.is_grad_enabled()
        key = pack.shape, has_gradient, self._weights.has_adapters()
        if key in self._passes:
            self._passes.move_to_end(key)
            return self._passes[key]
        began = time.perf_counter()
        needed = self._num_bytes(pack.shape)
        held = self._recorder.num_bytes
        if self._most_bytes is not None and needed > self._largest and held + needed > self._most_bytes:
            # A pass that is larger than all before it cannot use their memory, but they can use its. Those that are
            # still needed are recorded again, with the same numbers.
            self._discard()
        self._largest = max(self._largest, needed)
        if self._module.copies is not None:
            self._module.copies.keeps_memory = True
        if has_gradient:
            self._gradients = self._gradients or {each: torch.empty_like(each) for each in self._weights.trained()}
        recorded = _Pass(self._module, pack, self._device, self._gradients if has_gradient else None)
        recorded.record(self._recorder, pack.inputs)
        self._passes[key] = recorded
        if len(self._passes) > _MOST_GRAPHS:
            self._passes.popitem(last=False)
        logger.info(
            "recorded a pass %s gradients of %d tokens (now %d), %d segments and %d predictions in %.2f s; %d are kept",
            "with" if has_gradient else "without",
            pack.shape.num_tokens,
            len(pack.input_ids),
            pack.shape.num_segments,
            pack.shape.num_predictions,
            time.perf_counter() - began,
            len(self._passes),
        )
        return recorded

    def _discard(self) -> None:
        self._passes.clear()
        self._largest = 0
        self._recorder.forget()

    def _num_bytes(self, shape: PassShape) -> int:
        """An estimate of the memory that a pass needs, and of what all passes keep."""
        weights = self._weights
        size, itemsize = weights.size, weights.dtype.itemsize
        most = max(shape.num_tokens, shape.num_predictions)
        # Keys and values of shared prompts are kept in every layer.
        copied = shape.num_keys * size.kv_values_per_token * itemsize
        scores = 0
        if not has_varlen_kernel(self._device, weights.dtype):
            pairs = shape.num_segments * shape.longest_query * shape.longest_key
            scores = _SCORES * pairs * weights.num_heads * itemsize * size.num_layers
        if not torch.is_grad_enabled():
            return size.forward_bytes(most, itemsize) + (copied + scores) // size.num_layers
        # The kernel's sums of the gradients of queries are filled up to 128 tokens per segment.
        sums = (shape.num_tokens + 128 * shape.num_segments) * size.hidden_size * 4
        # The gradients of all copies of a shared prompt's keys or values, and their sum in float32.
        summed = shape.num_shared * shape.num_places * size.kv_values_per_token // size.num_layers * (itemsize + 4)
        passing = copied + scores + sums + summed
        passing += size.activation_bytes(
            most, itemsize, is_checkpointed=False, kept_logits_gib=self._module.kept_logits_bytes / 2**30
        )
        return passing + 3 * weights.num_trained * itemsize  # working copies, and gradients as computed and as kept


class _Pass:
    """A forward pass over inputs of one shape, and its backward pass, on tensors whose addresses do not change."""

    def __init__(
        self,
        module: PackedModule,
        pack: FilledPack,
        device: torch.device,
        gradients: Mapping[nn.Parameter, Tensor] | None,
    ) -> None:
        """``gradients`` is where the backward pass writes; None for a pass that has none."""
        self._memory = torch.empty(num_bytes(pack.inputs), dtype=torch.uint8, device=device)
        inputs = FixedInputs(*views(self._memory, pack.inputs))
        dtype = module.model.get_input_embeddings().weight.dtype
        self._module = module
        self._pack = inputs.pack()
        self._attention = fixed_attention(inputs.tables(pack.shape), device, dtype)
        self._gradients = gradients
        self._roots: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.upstream: dict[str, Tensor] = {}
        """The gradients of those outputs that have one."""
        self.reached: list[nn.Parameter] = []
        """The weights that have a gradient."""
        self.given: _Given | None = None
        """The same with their gradients, after the first backward pass."""
        self.run_forward: Action = _not_recorded
        self.run_backward: Action = _not_recorded

    def record(self, recorder: PassRecorder, inputs: FixedInputs) -> None:
        self.load(inputs)
        if self._gradients is None:
            (self.run_forward,) = recorder.record([self._forward])
        else:
            self.run_forward, self.run_backward = recorder.record([self._forward, self._backward])

    def load(self, inputs: FixedInputs) -> None:
        upload_into(self._memory, inputs)

    def _forward(self) -> None:
        with torch.set_grad_enabled(self._gradients is not None):
            made = self._module.computed(self._pack, self._attention)
        self._roots = {name: each for name, each in made.items() if each.requires_grad}
        self.outputs = {name: each.detach() for name, each in made.items()}
        for name, each in self._roots.items():
            if name not in self.upstream:  # in the first run, which is not recorded
                self.upstream[name] = torch.zeros_like(each)

    def _backward(self) -> None:
        assert self._gradients is not None
        roots, self._roots = self._roots, {}
        weights = list(self._gradients)
        upstream = [self.upstream[name] for name in roots]
        made = torch.autograd.grad(list(roots.values()), weights, upstream, allow_unused=True)
        found = [(weight, each) for weight, each in zip(weights, made, strict=True) if each is not None]
        self.reached = [weight for weight, _ in found]
        torch._foreach_copy_([self._gradients[weight] for weight in self.reached], [each for _, each in found])


def _not_recorded() -> None:
    raise AssertionError("a pass is recorded before it is run")


class _Replay(torch.autograd.Function):
    """A recorded pass as one operation of torch's backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graphs: PassGraphs, recorded: _Pass, number: int) -> tuple[Tensor, ...]:
        recorded.run_forward()
        # Other objects on the same memory: torch marks those that are returned.
        made = {name: each.detach() for name, each in recorded.outputs.items()}
        ctx.graphs, ctx.recorded, ctx.number = graphs, recorded, number
        ctx.names = list(made)
        ctx.mark_non_differentiable(*(each for name, each in made.items() if name not in recorded.upstream))
        ctx.set_materialize_grads(False)
        return tuple(made.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        recorded: _Pass = ctx.recorded
        for name, gradient in zip(ctx.names, gradients, strict=True):
            if name in recorded.upstream:
                if gradient is None:
                    recorded.upstream[name].zero_()
                else:
                    recorded.upstream[name].copy_(gradient)
        ctx.graphs.backward(recorded, ctx.number)
        return None, None, None, None


class _Weights:
    """The weights of a module: where they are, and how large."""

    def __init__(self, module: PackedModule) -> None:
        self._module = module
        # The dictionaries stay the same; working copies replace what is in them.
        self._places = [
            (part, name)
            for each in module.modules()
            for part in (each._parameters, each._buffers)
            for name, value in part.items()
            if value is not None
        ]
        self._adapted = [layer for _, layer in adapted_layers(module.model)]
        self.size = replace(ModelSize.of(module.model), vocab_size=module.num_outputs)
        self.per_layer = sum(each.numel() for each in module.layers.parameters()) / len(module.layers)
        self.num_trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
        self.num_heads = int(module.model.config.get_text_config(decoder=True).num_attention_heads)

    @property
    def dtype(self) -> torch.dtype:
        copies = self._module.copies
        return self._module.model.get_input_embeddings().weight.dtype if copies is None else copies.dtype

    @staticmethod
    def are_known(module: PackedModule) -> bool:
        """Whether the config has the sizes from which memory is estimated."""
        config = module.model.config.get_text_config(decoder=True)
        return all(hasattr(config, name) for name in ("intermediate_size", "num_key_value_heads", "hidden_size"))

    def addresses(self) -> tuple[int, ...]:
        return tuple(part[name].data_ptr() for part, name in self._places)  # type: ignore[union-attr]

    def has_adapters(self) -> bool:
        """Whether a pass uses them: without its adapters, a model is its own reference."""
        return not any(layer._disable_adapters for layer in self._adapted)

    def trained(self) -> list[nn.Parameter]:
        """As passes see them now."""
        return [each for each in self._module.parameters() if each.requires_grad]
