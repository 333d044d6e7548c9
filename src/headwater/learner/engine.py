"""The training engine: one model, packed micro-batches, gradients summed over them, one optimiser."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwater.algorithms.aggregate import StepTotals, aggregate
from headwater.algorithms.policy_losses import PolicyLoss
from headwater.config.schema import LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError, RunError
from headwater.core.protocols import Bucket
from headwater.learner import sharded_checkpoint
from headwater.learner.lora import merged_shapes, merged_weights
from headwater.learner.memory import CPU
from headwater.learner.optimizer import Optimizer
from headwater.learner.packed_module import PackedModule
from headwater.learner.packing import Pack, Row, check_lengths, idle_pack, pack_rows, read_rows, token_column
from headwater.learner.ranks import Ranks
from headwater.learner.sharding import reshard, shard
from headwater.learner.step_sums import StepSums
from headwater.weights.memory import in_buckets

_FORWARD_FACTOR = 4
"""A pass without a gradient keeps nothing for later, so it may take so many times the tokens at once."""

_TOKENS = frozenset({"input_ids", "attention_mask", "position_ids"})

LossFunction = Callable[[Mapping[str, Tensor], DataProto], PolicyLoss]
"""From what the module computed, padded to ``[samples, response]``, and the micro-batch to a loss per token."""


class ForwardEngine:
    """Runs ``module`` over batches (see ``rollout.padding``) without training it."""

    _trains = False

    def __init__(
        self,
        module: PackedModule,
        config: LearnerConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
    ) -> None:
        self.module = module
        self.config = config
        self.ranks = ranks or Ranks.current()
        self.device: torch.device = module.model.device
        shard(module, self.ranks, config, compute_dtype=compute_dtype, device=self.device, trains=self._trains)

    @torch.no_grad()
    def compute(self, batch: DataProto) -> dict[str, Tensor]:
        """What the module says of the trained tokens, each ``[samples, response]``, 0 elsewhere."""
        results = {name: torch.zeros(token_column(batch, "response_mask").shape) for name in self.module.outputs}
        try:
            for pack, counts in self._packs(batch, _FORWARD_FACTOR * self.config.max_tokens_per_microbatch):
                outputs = self.module(pack)
                for name in self.module.outputs if counts else ():
                    results[name][pack.rows] = pack.padded(outputs[name]).cpu()
        finally:
            reshard(self.module)
        return results

    def offload(self) -> None:
        """Move everything to main memory, for a rollout on the same device."""
        self._move(CPU)

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        self.module.to(device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _packs(self, batch: DataProto, max_tokens: int) -> Iterator[tuple[Pack, bool]]:
        """The packs of this rank's rows, and whether they count.

        Ranks compute their layers together, so all make the same number of passes; one that has too few rows repeats
        one for company.
        """
        rows, width = self._rows(batch), token_column(batch, "response_mask").shape[1]
        packs, num_packs = self._pack(rows, width, max_tokens, 1), 0
        # Asked to make as many as another rank has, a rank may come to more.
        while (most := self.ranks.max(len(packs))) > num_packs:
            num_packs = most
            if rows and len(packs) < num_packs:
                packs = self._pack(rows, width, max_tokens, num_packs)
        for number in range(num_packs):
            counts = number < len(packs)
            yield (packs[number] if counts else packs[0] if packs else idle_pack(width)).to(self.device), counts

    def _rows(self, batch: DataProto) -> list[Row]:
        """This rank's rows. Where one rank's cannot be computed all raise, so that none waits for it."""
        problem: DataError | None = None
        rows: list[Row] = []
        try:
            rows = read_rows(batch)
            check_lengths(rows, self.config.max_tokens_per_microbatch)
        except DataError as error:
            problem = error
        if self.ranks.max(int(problem is not None)):
            raise problem or DataError("another rank cannot compute its rows; its own error says why")
        return rows

    def _pack(self, rows: Sequence[Row], width: int, max_tokens: int, min_packs: int) -> list[Pack]:
        return pack_rows(rows, width, max_tokens, min_packs=min_packs, share_prompts=self.config.share_prompts)


class TrainEngine(ForwardEngine):
    """Trains ``module``.

    Every micro-batch's loss is divided by the counts of the whole step, over all ranks, so how a batch is cut never
    changes the gradient. The trained weights are float32; ``compute_dtype`` is what the passes compute in.
    """

    _trains = True

    def __init__(
        self,
        module: PackedModule,
        config: LearnerConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
        num_decay_steps: int = 0,
    ) -> None:
        """``num_decay_steps`` are all optimiser steps of the run; a schedule that falls must be told them."""
        super().__init__(module, config, compute_dtype=compute_dtype, ranks=ranks)
        # Of this engine and its siblings, as long as they live: they leave the device together.
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizer = self._make_optimizer(config, num_decay_steps)

    def sibling(self, config: LearnerConfig) -> TrainEngine:
        """Another engine on the same weights, with an optimiser of its own, whose rate is constant."""
        other = copy.copy(self)
        other.config = config
        other._optimizer = self._make_optimizer(config, 0)
        return other

    def _make_optimizer(self, config: LearnerConfig, num_decay_steps: int) -> Optimizer:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        optimizer = Optimizer(trained, config, num_decay_steps)
        self._optimizers.add(optimizer)
        return optimizer

    def totals(self, batch: DataProto) -> StepTotals:
        """The counts that losses are averaged over, of all ranks' rows."""
        mask = token_column(batch, "response_mask")
        counts = torch.stack([mask.sum(), (mask.sum(dim=1) > 0).sum()]).double().to(self.device)
        num_tokens, num_sequences = self.ranks.sum(counts).tolist()
        return StepTotals(num_tokens, num_sequences, data_parallel_size=self.ranks.count, width=mask.shape[1])

    def train_step(
        self,
        batch: DataProto,
        loss_fn: LossFunction,
        *,
        aggregation: str = "token-mean",
        totals: StepTotals | None = None,
    ) -> dict[str, float]:
        """One optimiser step on the whole batch, of which each rank holds its rows.

        ``totals`` are those of the batch, unless rows without a gradient were left out of it. A loss or gradient that
        is not finite is skipped and counted, not applied.
        """
        totals = totals or self.totals(batch)
        if totals.num_tokens == 0:
            raise RunError("no token of the batch is trained: every loss_mask is 0; check the workflow")
        sums = StepSums(self.device)
        try:
            for pack, counts in self._packs(batch, self.config.max_tokens_per_microbatch):
                outputs = {name: pack.padded(values) for name, values in self.module(pack).items()}
                if counts:
                    self._backward(outputs, _micro(batch, pack), loss_fn, aggregation, totals, sums)
                else:
                    nothing = torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
                    nothing.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._optimizer.clear()  # half a step's gradients must not join the next one's
            reshard(self.module)
            raise
        statistics = sums.statistics(self.ranks)
        return {**statistics, **self._optimizer.step(statistics["loss"])}

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
        scaled = aggregate(loss.token_losses, mask, loss.aggregation or aggregation, totals)
        scaled.backward()  # type: ignore[no-untyped-call]
        # Ranks average their gradients, which the loss makes up for; the loss that is shown is the sum.
        sums.add_loss(scaled / totals.data_parallel_size)
        shown = {**{name: values for name, values in outputs.items() if name == "entropy"}, **loss.diagnostics}
        sums.add(shown, mask)
        if loss.weights is not None:
            sums.add_weights(loss.weights, mask)
        if loss.log_ratios is not None:
            sums.add_ratios(loss.log_ratios, mask)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, under its Hugging Face name; all ranks take part."""
        yield from merged_weights(self.module.model)

    def export(self) -> Iterator[Bucket]:
        return in_buckets(self.export_weights())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(merged_shapes(self.module.model))

    def save(self, folder: Path) -> None:
        """What is trained and its optimiser, a shard per rank."""
        sharded_checkpoint.save(folder, self.module.model, self._optimizer, self.ranks)

    def load(self, folder: Path) -> None:
        sharded_checkpoint.load(folder, self.module.model, self._optimizer, self.ranks)

    def _move(self, device: torch.device) -> None:
        for optimizer in self._optimizers:
            optimizer.move(device)
        super()._move(device)


def _micro(batch: DataProto, pack: Pack) -> DataProto:
    """The rows of a pack, without the tokens, which the pack holds."""
    return batch.select(sorted(set(batch.batch.keys()) - _TOKENS))[pack.rows].to(pack.row.device)
