"""The modules that an engine runs: a transformers decoder on a pack, and outputs computed from its hidden states.

Logits never exist for a whole batch: the output layer is applied to a chunk of tokens at a time. In the backward pass
it is applied again, unless there was enough memory to keep the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.core.errors import DataError
from headwater.learner.freeze import vision_modules
from headwater.learner.packing import Pack, PackMedia
from headwater.learner.working_copies import WorkingCopies, add_all
from headwater.models.device import free_for_large_tensors
from headwater.models.packed_attention import PackedAttention, gather_rows, packed_attention, use_packed_attention
from headwater.models.precision import has_wide_logits, wide_linear

if TYPE_CHECKING:
    from headwater.learner.context_parallel import ContextGroup
    from headwater.models.vision import VisionProcessor, VisionTower

_CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 29}
"""The number of logits in a chunk: 128 MiB of float32 on a CPU, 2 GiB on a GPU."""
_LOGIT_BYTES = 4
_KEPT_BYTES = 2 << 30
"""By default, the largest logits of a pass that are kept for its backward pass (``learner.kept_logits_gib``)."""


_SPARE_SHARE = 0.1
"""Of a GPU's memory, which stays free if more logits are kept."""
USES_LOGIT_KERNELS = True
"""On CUDA. False compiles the plain functions with torch instead, for a comparison (``benchmarks/train_step.py``)."""


class TokenStatistics(NamedTuple):
    """All are ``[tokens]`` in float32."""

    logprobs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor
    """The sum of the squared probabilities. It has no gradient."""


class PackedModule(nn.Module):
    """A model whose forward pass takes a pack and returns named values, one per trained token.

    It wraps the transformers model so that FSDP sees a single forward call from the embedding to the result.
    """

    outputs: ClassVar[tuple[str, ...]]
    """The names of the values that ``forward`` returns."""
    num_outputs: int = 1
    """The width of the output layer."""
    context: ContextGroup | None = None
    """The ranks that compute every pack together with this one, if there are any."""
    kept_logits_bytes: int = _KEPT_BYTES
    """The largest logits of a pass that are kept for its backward pass."""
    keeps_more_logits: bool = False
    """Whether logits beyond that are kept on a GPU while it has enough free memory."""
    copies: WorkingCopies | None = None
    """The weights in the type of the passes, if one process converts all of them at once."""

    def __init__(self, model: Any, processor: VisionProcessor | None = None) -> None:
        """``processor`` makes the inputs of the model's vision tower; None for a model that reads only text."""
        super().__init__()
        use_packed_attention(model)
        # Dropout stays off, so that the trained policy is the policy that sampled.
        self.model = model.eval()
        self.processor = processor
        self.tower: VisionTower | None = None
        self.vision_modules: list[nn.Module] = []
        """The parts of the model that see pixels. They are parts of ``model``, so they are not registered again."""
        if processor is not None:
            from headwater.models.vision import VisionTower  # only these models need it

            self.tower, self.vision_modules = VisionTower(model, processor), vision_modules(model)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, which are sharded, checkpointed and compiled one by one."""
        layers = self.model.get_decoder().layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    def forward(self, pack: Pack) -> Mapping[str, Tensor]:
        if self.copies is not None:
            self.copies.use()
        # Inside a forward pass, a sharded weight has the type that the layers compute in.
        dtype = self.model.get_input_embeddings().weight.dtype
        attention = packed_attention(pack.segments, pack.input_ids.device, dtype)
        if self.context is None:
            return self.computed(pack, attention)
        share = self.context.share(pack)
        states = self.hidden(share.pack, self.context.attention(attention, pack))
        return self.context.joined(self.values_of(share.pack, states), share, pack)

    def computed(self, pack: Pack, attention: PackedAttention) -> Mapping[str, Tensor]:
        """A pass on one rank, with the weights as they are now."""
        return self.values_of(pack, self.hidden(pack, attention))

    def values_of(self, pack: Pack, hidden: Tensor) -> Mapping[str, Tensor]:
        """The outputs, computed from the result of ``hidden``."""
        raise NotImplementedError

    def hidden(self, pack: Pack, attention: PackedAttention) -> Tensor:
        """The hidden state that predicts each trained token, ``[trained tokens, hidden size]``."""
        positions = pack.position_ids
        states = self.model.get_decoder()(
            **self._inputs(pack),
            position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
            use_cache=False,
            packed_attention=attention,
        ).last_hidden_state.squeeze(0)
        return gather_rows(states, pack.predictors)

    def _inputs(self, pack: Pack) -> dict[str, Any]:
        """The tokens, or their embeddings where media or a trained vision tower matter."""
        trained = list(self._trained_vision()) if torch.is_grad_enabled() else []
        if pack.media is None and not trained:
            return {"input_ids": pack.input_ids[None]}
        embeddings = self.model.get_input_embeddings()(pack.input_ids)
        inputs = {} if pack.media is None else self._media_inputs(embeddings, pack.media, has_gradient=bool(trained))
        embeddings = inputs.get("inputs_embeds", embeddings[None])
        if trained and (pack.media is None or not embeddings.requires_grad):
            embeddings = embeddings + _zero_of(trained).to(embeddings.dtype)
        return {**inputs, "inputs_embeds": embeddings}

    def _media_inputs(self, embeddings: Tensor, media: PackMedia, *, has_gradient: bool) -> dict[str, Any]:
        """The embeddings of the tokens, with those of media in their places."""
        assert self.tower is not None, "read_rows has refused media"
        with torch.set_grad_enabled(has_gradient):
            features = self.tower(media.contents)
        found = [len(each.embeddings) for each in features]
        if found != media.num_tokens:
            raise DataError(
                f"the vision tower made {found} embeddings of the images and videos of a pass, but {media.num_tokens} "
                "tokens stand for them; load the model and its processor from the same folder"
            )

        def placed(parts: Sequence[Tensor]) -> Tensor:
            return gather_rows(torch.cat(list(parts)), media.sources)

        shown = placed([each.embeddings for each in features]).to(embeddings.dtype)
        inputs: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(0, media.places, shown)[None]}
        if features[0].deep:
            is_media = torch.zeros(len(embeddings), dtype=torch.bool, device=embeddings.device)
            inputs["visual_pos_masks"] = is_media.index_fill(0, media.places, True)[None]
            layers = zip(*(each.deep for each in features), strict=True)
            inputs["deepstack_visual_embeds"] = [placed(layer) for layer in layers]
        return inputs

    @property
    def trains_vision(self) -> bool:
        return next(self._trained_vision(), None) is not None

    def _trained_vision(self) -> Iterator[nn.Parameter]:
        # Looked up in every pass: adapters are added later, and copies and shards replace the parameters.
        return (each for module in self.vision_modules for each in module.parameters() if each.requires_grad)


def _zero_of(weights: Sequence[Tensor]) -> Tensor:
    """Zero, with a gradient of zero for all of ``weights``.

    A pass without pictures does not use a trained vision tower. Another rank may use it in the same pass, and all ranks
    must reduce the same gradients in the same order. So this is added to the inputs of the first layer: FSDP reduces a
    layer whose inputs have no gradient later, after the weights outside of layers, and ranks that disagree about it
    would add the gradients of different weights.
    """
    return torch.stack([each.reshape(-1)[0] for each in weights]).sum() * 0.0


class PolicyModule(PackedModule):
    """``logprobs`` of the trained tokens, ``entropy`` and ``sum_pi_squared`` of the distributions they were drawn from.

    ``temperature`` is the sampling temperature, so that the engine and the learner use the same distribution.
    """

    outputs = TokenStatistics._fields

    def __init__(self, model: Any, temperature: float, processor: VisionProcessor | None = None) -> None:
        super().__init__(model, processor)
        self._temperature = temperature
        self.num_outputs = model.get_output_embeddings().weight.shape[0]

    def values_of(self, pack: Pack, hidden: Tensor) -> Mapping[str, Tensor]:
        head = self.model.get_output_embeddings()
        return token_logprobs(
            hidden,
            head.weight,
            head.bias,
            pack.targets,
            self._temperature,
            kept_bytes=self.kept_logits_bytes,
            keeps_more=self.keeps_more_logits,
        )._asdict()


class ValueModule(PackedModule):
    """``values``: the return that is still to come, predicted before each trained token."""

    outputs = ("values",)

    def __init__(self, model: Any, processor: VisionProcessor | None = None) -> None:
        super().__init__(model, processor)
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise TypeError(f"{type(model).__name__} has no linear layer named score; see models.load_critic")

    def values_of(self, pack: Pack, hidden: Tensor) -> Mapping[str, Tensor]:
        # In float32: bfloat16 cannot represent small differences between values.
        values = F.linear(hidden.float(), self.model.score.weight.float())
        return {"values": values[:, 0].clone()}  # FSDP warns about views


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    *,
    kept_bytes: int = _KEPT_BYTES,
    keeps_more: bool = False,
) -> TokenStatistics:
    """Statistics of every target token and of the distribution over the vocabulary at its position.

    ``hidden`` is ``[tokens, hidden size]``. ``weight`` and ``bias`` are those of the output layer. Logits of at most
    ``kept_bytes`` are kept for the backward pass, and with ``keeps_more`` also those for which a GPU has enough free
    memory. Others are computed again there, with the same result.
    """
    if bias is None:
        bias = weight.new_zeros(())
    size = max(1, _CHUNK_ELEMENTS[hidden.device.type] // weight.shape[0])
    keeps: Callable[[], bool] = _never
    if torch.is_grad_enabled():
        is_small = len(targets) * weight.shape[0] * _LOGIT_BYTES <= kept_bytes
        keeps = _always if is_small else partial(_has_room, weight, size) if keeps_more else _never
    return TokenStatistics(*_TokenLogprobs.apply(hidden, weight, bias, targets, temperature, size, keeps))  # type: ignore[no-untyped-call]


def _always() -> bool:
    return True


def _never() -> bool:
    return False


def _has_room(weight: Tensor, num_tokens: int) -> bool:
    """Whether a GPU has enough memory left for the rest of the pass if the present chunk of logits is kept.

    The rest is at most another chunk, its gradient, and the gradient of the output layer in two types. Then the
    activations of one layer after the other are freed, which a share of the memory leaves time for.
    """
    device = weight.device
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    chunk = num_tokens * weight.shape[0] * _LOGIT_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    return free_for_large_tensors(device) >= 2 * chunk + 8 * weight.numel() + _SPARE_SHARE * total


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        temperature: float,
        size: int,
        keeps: Callable[[], bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        statistics, _ = _functions(hidden.device)
        results = []
        kept: list[Tensor | None] = []
        for part, target in zip(torch.split(hidden, size), torch.split(targets, size), strict=True):
            logits = _logits(part, weight, bias)
            results.append(statistics(logits, target, temperature))
            kept.append(logits if keeps() else None)
            del logits
        logprobs, entropies, squares, normalizers = (torch.cat(each) for each in zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, normalizers, *kept)
        ctx.temperature, ctx.size = temperature, size
        ctx.mark_non_differentiable(squares)
        return logprobs, entropies, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, normalizers, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        _, logits_gradient = _functions(hidden.device)
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        weight_gradient: Tensor | None = None
        bias_gradient = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if needs_bias else None
        for number, start in enumerate(range(0, len(hidden), ctx.size)):
            chunk = slice(start, start + ctx.size)
            logits = kept[number]
            if logits is None:
                logits = _logits(hidden[chunk], weight, bias)
            gradient = logits_gradient(
                logits,
                targets[chunk],
                normalizers[chunk],
                entropies[chunk],
                *(each[chunk] for each in gradients[:2]),
                ctx.temperature,
                hidden.dtype,
            )
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[chunk])
            if needs_weight:
                weight_gradient = _plus_product(weight_gradient, gradient.T, hidden[chunk])
            if bias_gradient is not None and bias.ndim:
                bias_gradient += gradient.sum(dim=0, dtype=torch.float32)
        if needs_weight and weight_gradient is None:
            weight_gradient = torch.zeros_like(weight)
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right``, whose sum is float32, whatever type the passes compute in."""
    if total is None:
        return left @ right
    total = total.float()
    if left.dtype == torch.float32:
        return total.addmm_(left, right)
    add_all([total], [left @ right])
    return total


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """In float32, whatever the layers compute in: the engine does not round them either."""
    if hidden.dtype != torch.float32 and has_wide_logits(hidden.dtype):
        return wide_linear(hidden, weight, bias if bias.ndim else None)
    return torch.addmm(bias, hidden, weight.T) if bias.ndim else hidden @ weight.T


def _statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, sum of squared probabilities, and the logarithm of the normaliser."""
    # One exponential per logit serves all sums. In place, because a chunk of logits takes much of the memory.
    shifted = logits.float() / temperature
    highest = shifted.amax(dim=-1, keepdim=True)
    shifted -= highest
    weights = shifted.exp()
    total = weights.sum(dim=-1)
    log_total = total.log()
    logprobs = shifted.gather(-1, targets[:, None])[:, 0] - log_total
    entropy = log_total - shifted.mul_(weights).sum(dim=-1) / total
    return logprobs, entropy, weights.square_().sum(dim=-1) / total.square(), highest[:, 0] + log_total


def _logits_gradient(
    logits: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    logprob_gradient: Tensor,
    entropy_gradient: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits in ``dtype``, the type of the products that follow."""
    logprobs = logits.float() / temperature
    logprobs -= normalizers[:, None]
    gradient = logprobs + entropies[:, None]
    gradient *= entropy_gradient[:, None]
    gradient += logprob_gradient[:, None]
    gradient *= logprobs.exp_()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    gradient = torch.where(is_target, logprob_gradient[:, None], 0.0).sub_(gradient)
    return gradient.div_(temperature).to(dtype)


_Functions = tuple[Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], Callable[..., Tensor]]


def _functions(device: torch.device) -> _Functions:
    """``_statistics`` and ``_logits_gradient``. On CUDA, kernels that compute each in a single pass over the logits."""
    if device.type != "cuda":
        return _statistics, _logits_gradient
    if USES_LOGIT_KERNELS:
        from headwater.learner import logit_kernels  # Triton needs a GPU

        return logit_kernels.statistics, logit_kernels.logits_gradient
    return _compiled(_statistics), _compiled(_logits_gradient)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function)

    def call(*arguments: Any) -> Any:
        # Only the number of tokens varies. A fixed vocabulary size makes the kernels three times as fast.
        for each in arguments:
            if isinstance(each, Tensor):
                torch._dynamo.maybe_mark_dynamic(each, 0)
        return compiled(*arguments)

    return call
