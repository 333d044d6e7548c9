"""The training engine: one model, packed micro-batches, gradients summed over them, one optimiser."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwater.algorithms.masked import StepTotals, aggregate, count_sequences
from headwater.algorithms.policy_losses import PolicyLoss
from headwater.config.schema import LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.core.dispatch import DISPATCH_KEY, dispatched_rows
from headwater.core.errors import DataError, OtherRankFailed, RunError
from headwater.learner import sharded_checkpoint
from headwater.learner.fixed_pack import FilledPack
from headwater.learner.graphs import PassGraphs
from headwater.learner.loss_scale import LossScale
from headwater.learner.optimizer import CPU, Optimizer, Residency
from headwater.learner.packed_module import PackedModule
from headwater.learner.packing import (
    LossColumns,
    Pack,
    PackRow,
    check_lengths,
    idle_pack,
    pack_rows,
    read_rows,
    token_column,
)
from headwater.learner.partition import minibatch_rows
from headwater.learner.pictures_ahead import PicturesAhead
from headwater.learner.ranks import Ranks, collect_gradients, reshard, shard
from headwater.learner.step_sums import StepSums
from headwater.models.flops import PassFlops, peak_flops
from headwater.models.sharded_load import ShardReader

LossFunction = Callable[[Mapping[str, Tensor], DataProto], PolicyLoss]
"""Computes a loss per token from the module's outputs, padded to ``[samples, response]``, and the micro-batch."""


def minibatches(experience: DataProto, config: LearnerConfig) -> Iterator[DataProto]:
    """Every mini-batch of every epoch, in order. Of a batch split over ranks, this rank's rows of each mini-batch.

    The number of mini-batches does not depend on the number of rows, and some may be empty, because ranks with
    different numbers of rows take their optimiser steps together.
    """
    is_split = DISPATCH_KEY in experience.meta_info
    rows, num_rows = dispatched_rows(experience) if is_split else (None, len(experience))
    for _ in range(config.num_epochs):
        for part in minibatch_rows(num_rows, config.num_minibatches):
            if rows is not None:
                yield experience[(rows >= part.start) & (rows < part.stop)]
            else:  # a slice shares the memory of the batch; copying the columns would take longer than packing them
                yield experience[part.start : part.stop]


class ForwardEngine:
    """Runs ``module`` over batches (see ``rollout.group``) without training it.

    With several ranks, ``module`` may hold parameters on the meta device. ``weights`` then names the files from which
    every rank reads its shard.
    """

    _trains = False
    _ahead: PicturesAhead | None = None
    graphs: PassGraphs | None = None
    """Computes small packs with few launches; None if the module's passes cannot be recorded."""
    pass_tokens = 0
    """Tokens of the largest pass with gradients of the last batch; 0 if there was none."""
    forward_pass_tokens = 0
    """The same for passes without gradients."""

    def __init__(
        self,
        module: PackedModule,
        config: LearnerConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
        weights: ShardReader | None = None,
    ) -> None:
        self.module = module
        self.config = config
        self.ranks = ranks or Ranks.current(config.context_parallel)
        self.device: torch.device = device or module.model.device
        self.use_device()
        shard(
            module,
            self.ranks,
            config,
            compute_dtype=compute_dtype,
            device=self.device,
            trains=self._trains,
            weights=weights,
        )
        self.graphs = PassGraphs.of(module, config, self.ranks.count, self.device)
        if module.processor is not None:
            self._ahead = PicturesAhead(module.processor)
        self.residency, self.frozen = Residency(self.device), Residency(self.device)
        """Of the parameters that are trained, and of the others, whose copy in main memory stays valid."""

    def use_device(self) -> None:
        """Make the engine's GPU the current one of this thread, which is where Triton launches kernels."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)

    def compute(self, batch: DataProto) -> dict[str, Tensor]:
        """The module's outputs for the trained tokens, each ``[samples, response]``, 0 elsewhere."""
        # All at once: the device is waited for at the end only.
        names = self.module.outputs
        return dict(zip(names, self._computed(batch, names).cpu(), strict=True))

    def compute_on_device(self, batch: DataProto, name: str) -> Tensor:
        """One of the outputs, on the device, which is not waited for."""
        return self._computed(batch, [name])[0]

    @torch.no_grad()
    def _computed(self, batch: DataProto, names: Sequence[str]) -> Tensor:
        """``[names, samples, response]``."""
        self.use_device()
        shape, max_tokens = token_column(batch, "response_mask").shape, self.config.forward_tokens
        results = torch.zeros(len(names), *shape, device=self.device)
        try:
            rows = self._rows(batch, max_tokens, "learner.max_tokens_per_forward_pass")
            for pack, counts in self.packs(rows, shape[1], max_tokens):
                outputs = self.values(pack)
                if counts:
                    values = torch.stack([outputs[name] for name in names])
                    results[:, pack.batch_rows[pack.row], pack.column] = values.to(results.dtype)
        finally:
            reshard(self.module)
        return results

    def values(self, pack: Pack) -> Mapping[str, Tensor]:
        """The module's outputs for one of ``packs``, valid until the next call."""
        made = self.graphs(pack) if self.graphs is not None and isinstance(pack, FilledPack) else None
        if made is not None:
            return made
        outputs: Mapping[str, Tensor] = self.module(pack)
        return outputs

    def prepare_offload(self) -> None:
        """Start to copy the parameters to main memory while they are still used, but not changed."""
        for residency, parameters in self._parameters():
            residency.copy_out(parameters)

    def offload(self) -> None:
        """Move everything to main memory, to make room for a rollout on the same device."""
        self._move(CPU)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._move(self.device)

    @property
    def is_away(self) -> bool:
        """Whether anything is in main memory, or has not returned completely."""
        return self.residency.is_away or self.frozen.is_away

    def close(self) -> None:
        """End the threads that read pictures."""
        if self._ahead is not None:
            self._ahead.close()

    def _move(self, device: torch.device) -> None:
        if device == CPU and self.graphs is not None:
            self.graphs.forget()
        for residency, parameters in self._parameters():
            if device == CPU:
                residency.release(parameters)
            else:
                residency.restore()
                residency.wait()

    def _parameters(self) -> list[tuple[Residency, Sequence[Tensor]]]:
        every = list(self.module.parameters())
        trained = [each for each in every if each.requires_grad]
        return [(self.residency, trained), (self.frozen, [each for each in every if not each.requires_grad])]

    def packs(self, rows: Sequence[PackRow], width: int, max_tokens: int) -> Iterator[tuple[Pack, bool]]:
        """The packs of this rank's rows, and whether their results count.

        Ranks compute their layers together, so all make the same number of passes. A rank with too few rows repeats a
        pack whose results do not count.
        """
        packs, num_packs, idle = self._pack(rows, width, max_tokens, 1), 0, idle_pack(width)
        # A rank that is asked for as many packs as another rank has may make even more.
        while (most := self.ranks.max(len(packs))) > num_packs:
            num_packs = most
            if rows and len(packs) < num_packs:
                packs = self._pack(rows, width, max_tokens, num_packs)

        def made(number: int) -> Pack:
            return packs[number] if number < len(packs) else packs[0] if packs else idle

        following: Pack | None = None
        most_tokens = 0
        for number in range(num_packs):
            # Made one by one: the device computes a pack while the host makes the next one.
            pack = made(number) if following is None else following
            if self._ahead is not None:
                following = made(number + 1) if number + 1 < num_packs else None
                self._ahead.read(pack, following)
            most_tokens = max(most_tokens, len(pack.input_ids))
            if torch.is_grad_enabled():
                self.pass_tokens = most_tokens
            else:
                self.forward_pass_tokens = most_tokens
            moved = pack.to(self.device)
            yield moved if self.graphs is None else self.graphs.filled(pack, moved), number < len(packs)

    def _rows(self, batch: DataProto, max_tokens: int, key: str) -> list[PackRow]:
        def read() -> list[PackRow]:
            rows = read_rows(batch)
            check_lengths(rows, max_tokens, key)
            self._check_media(rows)
            return rows

        return self.agreed(read)

    def _check_media(self, rows: Sequence[PackRow]) -> None:
        row = next((row for row in rows if row.media), None)
        if row is not None and self.module.tower is None:
            raise DataError(
                f"row {row.index} of the batch has images or videos, but this {self.module.model.config.model_type} "
                "model reads only text; use a vision model (model.path, reference.path, critic.path)"
            )

    def agreed(self, read: Callable[[], list[PackRow]]) -> list[PackRow]:
        """This rank's rows. If one rank cannot compute its rows, all ranks raise, so that none waits for it."""
        problem: DataError | None = None
        rows: list[PackRow] = []
        try:
            rows = read()
        except DataError as error:
            problem = error
        if self.ranks.max(int(problem is not None)):
            raise problem or OtherRankFailed("another rank cannot compute its rows; see the error of that rank")
        return rows

    def _pack(self, rows: Sequence[PackRow], width: int, max_tokens: int, min_packs: int) -> Sequence[Pack]:
        return pack_rows(rows, width, max_tokens, min_packs=min_packs, share_prompts=self.config.share_prompts)


class TrainEngine(ForwardEngine):
    """Trains ``module``.

    Every micro-batch's loss is divided by the counts of the whole step, over all ranks, so the gradient does not depend
    on how a batch is cut. The trained weights are float32; passes compute in ``compute_dtype``.
    """

    _trains = True

    def __init__(
        self,
        module: PackedModule,
        config: LearnerConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
        weights: ShardReader | None = None,
        num_decay_steps: int = 0,
    ) -> None:
        """``num_decay_steps`` is the number of optimiser steps of the run, which a decaying schedule needs."""
        super().__init__(module, config, compute_dtype=compute_dtype, ranks=ranks, device=device, weights=weights)
        self._compute_dtype = compute_dtype
        module.kept_logits_bytes = int(config.kept_logits_gib * 2**30)
        module.keeps_more_logits = config.keep_logits_if_free
        # The optimisers of this engine and of its siblings, which are offloaded together.
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizer = self._make_optimizer(config, num_decay_steps)
        self.peak_flops = peak_flops(self.device, compute_dtype)
        """Operations per second that the device can compute; None if that is not known."""
        # The output layer is computed only for trained tokens, and a critic has one output.
        self._flops = PassFlops.of(module.model, module.layers, module.num_outputs)
        is_partial = any(not parameter.requires_grad for parameter in module.layers.parameters())
        self._num_passes = 2.0 if is_partial else 3.0
        """Of the cost of a forward pass. Frozen weights, such as those below LoRA adapters, need no gradients."""

    def sibling(self, config: LearnerConfig) -> TrainEngine:
        """Another engine on the same weights, with a separate optimiser whose rate is constant."""
        other = copy.copy(self)
        other.config = config
        other._optimizer = self._make_optimizer(config, 0)
        return other

    def _make_optimizer(self, config: LearnerConfig, num_decay_steps: int) -> Optimizer:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        scale = None
        if self._compute_dtype == torch.float16:
            scale = LossScale(config.loss_scale, growth_steps=config.loss_scale_growth_steps)
        optimizer = Optimizer(trained, config, num_decay_steps, scale)
        self._optimizers.add(optimizer)
        return optimizer

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def totals(self, batch: DataProto) -> StepTotals:
        """The counts that losses are averaged over, summed over the rows of all ranks."""
        mask = token_column(batch, "response_mask")
        weights = batch.batch.get("sequence_weights", None)
        sequences = count_sequences(mask, weights).double()
        rows = sequences if weights is not None else torch.full_like(sequences, len(mask))
        counts = torch.stack([mask.sum().double(), sequences, rows])
        if self.ranks.count > 1:  # a single rank does not wait for its device
            counts = self.ranks.sum(counts.to(self.device))
        num_tokens, num_sequences, num_rows = counts.tolist()
        return StepTotals(num_tokens, num_sequences, mask.shape[1], self.ranks.count, num_rows)

    def train_step(
        self,
        batch: DataProto,
        loss_fn: LossFunction,
        *,
        aggregation: str = "token-mean",
        totals: StepTotals | None = None,
        compares_rollouts: bool = False,
    ) -> dict[str, float]:
        """One optimiser step on the whole batch, of which each rank holds its rows.

        ``totals`` defaults to the counts of ``batch``. Pass it if rows without a gradient were left out. A loss or
        gradient that is not finite is skipped and counted, not applied. ``compares_rollouts`` compares the log-probs
        with the column ``rollout_logprobs``.
        """
        self.use_device()
        self.residency.changed()
        totals = totals or self.totals(batch)
        if totals.num_tokens == 0:
            raise RunError("no token of the batch is trained: every loss_mask is 0; check the workflow")
        sums = StepSums(self.device)
        try:
            width, max_tokens = token_column(batch, "response_mask").shape[1], self.config.max_tokens_per_microbatch
            rows = self._rows(batch, max_tokens, "learner.max_tokens_per_microbatch")
            columns = LossColumns(batch, self.device)
            for pack, counts in self.packs(rows, width, max_tokens):
                outputs = {name: pack.padded(values) for name, values in self.values(pack).items()}
                if counts:
                    micro = columns.of(pack)
                    self._backward(outputs, micro, loss_fn, aggregation, totals, sums)
                    sums.add_flops(self._num_passes * self._pass_flops(pack) + self._vision_flops(pack))
                    if compares_rollouts:
                        tensors = micro.batch
                        sums.add_gap(outputs["logprobs"], tensors["rollout_logprobs"], tensors["response_mask"])
                else:
                    nothing = torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
                    nothing.backward()  # type: ignore[no-untyped-call]
                collect_gradients(self.module)
            reshard(self.module)
            # Queued before the statistics are read, so that both are read together: the host waits once per step.
            norm = self._optimizer.clip()
            if self.ranks.count == 1:  # the loss of all ranks is not known yet
                self._optimizer.queue(sums.loss, norm)
            statistics, (norm_value,) = sums.read(self.ranks, [norm], has_gap=compares_rollouts)
            return {**statistics, **self._optimizer.step(statistics["loss"], norm_value)}
        except BaseException:
            self._optimizer.clear()  # a partial gradient must not be added to the next step's
            reshard(self.module)
            raise

    def _backward(
        self,
        outputs: Mapping[str, Tensor],
        micro: DataProto,
        loss_fn: LossFunction,
        aggregation: str,
        totals: StepTotals,
        sums: StepSums,
    ) -> None:
        mask = micro.batch["response_mask"]
        loss = loss_fn(outputs, micro)
        weights = micro.batch.get("sequence_weights", None)
        kept = mask if loss.correction is None else loss.correction.mask
        scaled = aggregate(loss.token_losses, kept, loss.aggregation or aggregation, totals, weights)
        scale = self._optimizer.loss_scale
        (scaled if scale is None else scaled * scale.value).backward()  # type: ignore[no-untyped-call]
        # FSDP averages gradients over ranks and the loss is scaled to compensate. The reported loss is the sum.
        sums.add_loss(scaled / totals.data_parallel_size)
        shown = {**{name: values for name, values in outputs.items() if name == "entropy"}, **loss.diagnostics}
        sums.add(shown, kept)
        if loss.correction is not None:
            sums.add(loss.correction.diagnostics, mask)
        if loss.weights is not None:
            sums.add_weights(loss.weights, mask)
        if loss.log_ratios is not None:
            sums.add_ratios(loss.log_ratios, mask)

    def _pass_flops(self, pack: Pack) -> float:
        each, segments = self._flops, pack.segments
        lengths = segments.lengths
        pairs = float((lengths * segments.prefix_lengths + lengths * (lengths + 1) // 2).sum())
        return each.per_token * len(pack.input_ids) + each.per_pair * pairs + each.per_prediction * len(pack.targets)

    def _vision_flops(self, pack: Pack) -> float:
        """Of the forward pass of the tower, and of its backward pass if it is trained."""
        num_tokens = sum(pack.media.num_tokens) if pack.media is not None else 0
        return (self._num_passes if self.module.trains_vision else 1.0) * self._flops.per_media_token * num_tokens

    def save(self, folder: Path, *, with_optimizer: bool = True) -> None:
        """Write the trained weights and the optimiser's state, one shard per rank."""
        sharded_checkpoint.save(folder, self.module.model, self._optimizer, self.ranks, with_optimizer=with_optimizer)

    def shards(self, *, with_optimizer: bool = True) -> sharded_checkpoint.Shards:
        """What ``save`` writes."""
        return sharded_checkpoint.take_shards(
            self.module.model, self._optimizer, self.ranks, with_optimizer=with_optimizer
        )

    def shards_to_come(self, *, with_optimizer: bool = True) -> dict[str, Tensor]:
        """Tensors like those that ``shards`` has after the first step."""
        return sharded_checkpoint.shards_to_come(self.module.model, self.ranks, with_optimizer=with_optimizer)

    def load(self, folder: Path) -> None:
        self.residency.changed()
        self.frozen.changed()
        sharded_checkpoint.load(folder, self.module.model, self._optimizer, self.ranks)

    @property
    def is_away(self) -> bool:
        return super().is_away or any(each.residency.is_away for each in self._optimizers)

    def _move(self, device: torch.device) -> None:
        # The parameters are needed first. The averages arrive while the first passes are computed.
        super()._move(device)
        for optimizer in self._optimizers:
            optimizer.move(device)
