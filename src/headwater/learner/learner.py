"""The learner: every model that training needs, behind one object that the trainer calls."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.config.schema import Config
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError, HeadwaterError
from headwater.core.learner import LearnerStatus, ProfileOrder, RankStatus, Role
from headwater.core.media import MEDIA_COLUMN
from headwater.core.parcels import Content, Parcel, SendOrder, SendReport
from headwater.core.protocols import Bucket
from headwater.learner.actor import Actor
from headwater.learner.critic import Critic
from headwater.learner.engine import ForwardEngine, TrainEngine
from headwater.learner.export import (
    merged_weights,
    own_pieces,
    parcels,
    plain_name,
    trained_weights,
    unmerged_parameters,
    unmerged_weights,
    weight_shapes,
)
from headwater.learner.held import held_by
from headwater.learner.lora import without_adapters
from headwater.learner.packed_module import PackedModule
from headwater.learner.profiler import Profiler
from headwater.learner.rank_files import reporting, see_folder, wait_for_ranks
from headwater.learner.reward_model import RewardModel
from headwater.learner.step_sums import FLOPS, GAP
from headwater.models.checksum import checksum
from headwater.models.device import DTYPES
from headwater.models.save import WeightsToSave, save_model
from headwater.weights.memory import in_buckets

if TYPE_CHECKING:
    from headwater.learner.snapshot import Snapshot, Snapshots
    from headwater.weights.pieces import PieceSender

CONVERSATION = "conversation"
"""The object column that ``reward_model`` scores: a list of messages per row, the response last."""

_NUM_SUPERVISED_WARMUP_STEPS = 10


@dataclass
class LocalLearner:
    """The learner of one process: all of it, or one rank's shard.

    With several ranks every rank holds one, and all of them make the same calls, each with its rows of the batch
    (see ``cluster/group.py``).
    """

    config: Config
    actor: Actor
    tokenizer: Any
    critic: Critic | None = None
    reference: ForwardEngine | None = None
    """A separate frozen model, or the policy's engine, whose adapters are switched off. None if no KL is used."""
    reward_model: RewardModel | None = None
    connected: SendOrder | None = None
    _supervised: TrainEngine | None = None
    _sender: PieceSender | None = None
    _peak_bytes: int = 0
    _snapshots: Snapshots | None = None
    _writer: ThreadPoolExecutor | None = None
    _written: Future[None] | None = None
    """The end of the last snapshot that this rank writes on a thread."""
    _profiler: Profiler | None = None

    def compute(self, batch: DataProto, what: Sequence[str]) -> dict[str, Tensor]:
        columns: dict[str, Tensor] = {}
        for name in what:
            columns |= self._computation(name)(batch)
        self._note_peak()
        return columns

    def _computation(self, name: str) -> Callable[[DataProto], Mapping[str, Tensor]]:
        known: dict[str, tuple[Callable[[DataProto], Mapping[str, Tensor]], Any, str]] = {
            "logprobs": (self.actor.engine.compute, self.actor, ""),
            "reference_logprobs": (
                self._reference_logprobs,
                self.reference,
                "algorithm.kl_in_loss or algorithm.kl_in_reward > 0",
            ),
            "values": (lambda batch: {"values": self._critic().values(batch)}, self.critic, "critic.enabled=true"),
            "reward_model": (self._reward_scores, self.reward_model, "reward.model"),
        }
        if name not in known:
            raise ValueError(f"compute {name!r}: unknown; use one of {', '.join(known)}")
        computation, provider, setting = known[name]
        if provider is None:
            raise HeadwaterError(f"compute {name!r}: this run has no model for it; set {setting}")
        return computation

    def _reference_logprobs(self, batch: DataProto) -> dict[str, Tensor]:
        assert self.reference is not None, "checked by _computation"
        if self.reference is self.actor.engine:
            with without_adapters(self.reference.module):
                return {"reference_logprobs": self.reference.compute(batch)["logprobs"]}
        return {"reference_logprobs": self.reference.compute(batch)["logprobs"]}

    def _reward_scores(self, batch: DataProto) -> dict[str, Tensor]:
        assert self.reward_model is not None, "checked by _computation"
        if CONVERSATION not in batch.non_tensor_batch:
            raise DataError(
                f"compute 'reward_model': the batch has no column {CONVERSATION!r}; add the messages of each row"
            )
        media = batch.non_tensor_batch.get(MEDIA_COLUMN, ())
        if (row := next((row for row, each in enumerate(media) if each), None)) is not None:
            raise DataError(
                f"reward.model = {self.config.reward.model}: scores conversations as text, but row {row} of the batch "
                "has images or videos; use a reward function for them, and remove reward.model"
            )
        return {"reward_model": self.reward_model.scores(batch.non_tensor_batch[CONVERSATION].tolist())}

    def update(self, batch: DataProto) -> dict[str, float]:
        self.settle()
        stats: dict[str, float] = {}
        if self.critic is not None:
            stats |= _timed("critic", self.critic, batch)
        if self.critic is None or batch.meta_info["version"] >= self.config.critic.num_warmup_steps:
            stats |= _timed("actor", self.actor, batch)
        self._note_peak()
        return stats

    def supervise(self, batch: DataProto) -> dict[str, float]:
        self.settle()
        if self._supervised is None:
            # A separate optimiser: the averages of supervised gradients would distort the first policy updates. The
            # number of steps is not known in advance, so the rate stays constant.
            settings = replace(
                self.actor.engine.config,
                learning_rate=self.config.warm_start.learning_rate,
                num_warmup_steps=_NUM_SUPERVISED_WARMUP_STEPS,
                warmup_fraction=0.0,
                schedule="constant",
            )
            self._supervised = self.actor.engine.sibling(settings)
        stats = self._supervised.train_step(batch, _negative_log_likelihood)
        self._note_peak()
        return stats

    @torch.no_grad()
    def keep_reference(self, folder: Path) -> None:
        self._supervised = None
        if self.reference is None or self.reference is self.actor.engine or self.config.reference.path:
            return
        module = self.reference.module
        policy = {plain_name(name): each for name, each in self.actor.engine.module.model.named_parameters()}
        for name, parameter in module.model.named_parameters():
            held_by(parameter).copy_(held_by(policy[plain_name(name)]))
        self.reference.frozen.changed()
        if self._is_first:
            # A folder that exists is left from a warm start that did not reach a checkpoint.
            shutil.rmtree(folder, ignore_errors=True)
        self._save_model(module, folder)

    def export(self, role: Role = "policy") -> Iterator[Bucket]:
        self._return()
        return in_buckets(merged_weights(self._trained(role).module.model))

    def shapes(self, role: Role = "policy") -> dict[str, tuple[int, ...]]:
        return weight_shapes(self._trained(role).module.model)

    def export_unmerged(self, adapters_alone: bool) -> Iterator[Bucket]:
        self._return()
        return in_buckets(unmerged_weights(self.actor.engine.module.model, adapters_alone=adapters_alone))

    def unmerged_shapes(self, adapters_alone: bool) -> dict[str, tuple[int, ...]]:
        named = unmerged_parameters(self.actor.engine.module.model, adapters_alone=adapters_alone)
        return {name: tuple(each.shape) for name, each in named}

    def parcels(self, content: Content = "merged") -> list[Parcel]:
        engine = self.actor.engine
        return parcels(engine.module.model, engine.ranks.count, content)

    def connect(self, order: SendOrder) -> list[SendReport]:
        from headwater.weights.pieces import PieceSender  # only runs that send weights in this way need it

        if self._sender is None:
            device = self.actor.engine.device
            gpu = str(device) if device.type == "cuda" else ""
            self._sender = PieceSender(self.actor.engine.ranks.index, gpu)
        report = self._sender.connect(order)
        self.connected = None if report.failure else order
        return [report]

    def broadcast(self, order: SendOrder, content: Content = "merged") -> list[SendReport]:
        assert self._sender is not None, "connected before"
        self._return()
        engine = self.actor.engine
        pieces = own_pieces(engine.module.model, engine.ranks.index, engine.ranks.count, content)
        report = self._sender.send(order, self.parcels(content), pieces)
        if report.failure:
            self.connected = None
        return [report]

    def checksum(self, role: Role = "policy") -> str:
        self._return()
        return checksum(trained_weights(self._trained(role).module.model))

    def save(self, folder: Path) -> None:
        self._finish_writing()
        self._return()
        settings = self.config.trainer
        self._save_model(self.actor.engine.module, folder / "model", self._saved_dtype)
        self.actor.engine.save(folder, with_optimizer=settings.checkpoint_optimizer)
        if self.critic is not None:
            self.critic.engine.save(folder / "critic", with_optimizer=settings.checkpoint_optimizer)

    def prepare_snapshot(self) -> None:
        with_optimizer = self.config.trainer.checkpoint_optimizer
        parts = {
            name: each.shards_to_come(with_optimizer=with_optimizer) for name, each in self._saved_engines().items()
        }
        self._make_snapshots().prepare(parts, self.actor.engine.module.model, num_bytes_kept=self._bytes_to_move())

    def _bytes_to_move(self) -> int:
        """The most that the settings move to main memory in the first step: all weights, and the averages of AdamW."""
        settings = self.config.learner
        away = {"parameters", "optimizer"} & set(settings.residency)  # as the memory plan has decided
        moves = settings.offload_optimizer or settings.offload_during_rollout or away
        if not moves or self.actor.engine.device.type != "cuda":
            return 0
        parameters = (each for engine in self._engines() for each in engine.module.parameters())
        return sum(held_by(each).nbytes * (3 if each.requires_grad else 1) for each in parameters)

    def _make_snapshots(self) -> Snapshots:
        from headwater.learner.snapshot import Snapshots  # only runs that save need it

        if self._snapshots is None:
            self._snapshots = Snapshots(self.actor.engine.device, self.actor.engine.ranks)
        return self._snapshots

    def _saved_engines(self) -> dict[str, TrainEngine]:
        """By their folder in a checkpoint."""
        return {"": self.actor.engine, **({"critic": self.critic.engine} if self.critic is not None else {})}

    def snapshot(self, folder: Path) -> Snapshot | None:
        """With several ranks, all of them call this together, and each writes its own files of the snapshot."""
        from headwater.learner import snapshot as saving  # only runs that save need it

        self._return()
        engine, snapshots = self.actor.engine, self._make_snapshots()
        with_optimizer = self.config.trainer.checkpoint_optimizer
        parts = {name: each.shards(with_optimizer=with_optimizer) for name, each in self._saved_engines().items()}
        model, num_ranks = engine.module.model, engine.ranks.count
        shapes, dtypes = weight_shapes(model), self._saved_dtypes(model, self._saved_dtype)
        known = saving.trained_names(model)

        def save(weights: Iterable[tuple[str, Tensor]]) -> None:
            made = WeightsToSave(shapes, dtypes, weights)
            save_model(model, self.tokenizer, folder / "model", made, engine.module.processor)

        def write(copies: Mapping[str, Mapping[str, Tensor]], rest: saving.Rest) -> None:
            if num_ranks == 1:
                save(copies[saving.MODEL].items())
            saving.write_parts(folder, parts, copies)
            if num_ranks > 1:
                saving.write_rest(folder, rest, copies[saving.MODEL])
            if num_ranks > 1 and self._is_first:
                wait_for_ranks(folder, range(1, num_ranks))
                save(saving.joined_weights(folder, shapes, known, parts[""], rest))
                saving.remove_rest(folder)

        return snapshots.take(parts, model, write)

    def start_snapshot(self, folder: Path) -> bool:
        """On every rank: copy this rank's part, and write it on a thread. False if there is too little memory.

        ``rank_files.wait_for_ranks(folder, [0])`` waits until all ranks have written their files.
        """
        ranks = self.actor.engine.ranks
        self._finish_writing()
        with ranks.together():
            see_folder(folder)
        taken = self.snapshot(folder)
        if taken is None:
            return False
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

        def write() -> None:
            with reporting(folder, ranks.index):
                taken.write()

        self._written = self._writer.submit(write)
        return True

    def _finish_writing(self) -> None:
        """Wait for the files of an earlier snapshot, whose copies would be overwritten. Its errors are reported in its
        folder, and the thread that awaits them raises them."""
        if self._written is not None:
            wait([self._written])

    def settle(self) -> None:
        """Wait for a snapshot that is being copied, before weights change or move."""
        if self._snapshots is not None:
            self._snapshots.settle()

    def load(self, folder: Path) -> None:
        self.settle()
        self.actor.engine.load(folder)
        if self.critic is not None:
            self.critic.engine.load(folder / "critic")

    def profile(self, order: ProfileOrder | None) -> None:
        engine = self.actor.engine
        if order is not None and engine.ranks.index in order.ranks:
            self._profiler = Profiler(order, engine.ranks.index, engine.device)
        elif order is None and self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.finish()

    def prepare_offload(self) -> None:
        self.settle()
        for engine in self._engines():
            engine.prepare_offload()

    def offload(self) -> None:
        self.settle()
        for engine in self._engines():
            engine.offload()

    def onload(self) -> None:
        for engine in self._engines():
            engine.onload()

    def _return(self) -> None:
        """Before weights are read: bring back what an interrupt or an error has left in main memory."""
        if not any(engine.is_away for engine in self._engines()):
            return
        try:
            self.onload()
        except torch.OutOfMemoryError as error:
            raise HeadwaterError(
                f"the learner is in main memory, and its device has no room for it: {error}"
            ) from error

    def status(self) -> LearnerStatus:
        engine = self.actor.engine
        on_gpu = engine.device.type == "cuda"
        self._note_peak()
        every = list(self._engines())
        here = RankStatus(engine.ranks.index, socket.gethostname(), os.getpid(), str(engine.device), self._peak_bytes)
        return LearnerStatus(
            num_ranks=engine.ranks.count,
            device=str(engine.device),
            num_optimizer_steps=engine.optimizer.num_steps,
            learning_rate=engine.optimizer.learning_rate,
            memory_bytes=torch.cuda.memory_allocated(engine.device) if on_gpu else 0,
            recorded_bytes=sum(each.graphs.num_bytes for each in every if each.graphs is not None),
            pass_tokens=max(each.pass_tokens for each in every),
            forward_pass_tokens=max(each.forward_pass_tokens for each in every),
            ranks=(here,),
        )

    def _note_peak(self) -> None:
        """Keep the peak, because the first rank also measures single stages, which resets the counter."""
        device = self.actor.engine.device
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        else:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._peak_bytes = max(self._peak_bytes, peak)

    def close(self) -> None:
        """Leave the group of engines. Nothing else is held beyond the memory of this object."""
        if self._writer is not None:
            self._writer.shutdown()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._sender is not None:
            self._sender.close()
        for engine in self._engines():
            engine.close()

    @property
    def _is_first(self) -> bool:
        return self.actor.engine.ranks.index == 0

    def _engines(self) -> Iterator[ForwardEngine]:
        if self.reward_model is not None:
            yield self.reward_model.engine
        if self.reference is not None and self.reference is not self.actor.engine:
            yield self.reference
        if self.critic is not None:
            yield self.critic.engine
        yield self.actor.engine

    def _critic(self) -> Critic:
        if self.critic is None:
            raise HeadwaterError("this run has no critic; set critic.enabled=true")
        return self.critic

    def _trained(self, role: Role) -> TrainEngine:
        return self.actor.engine if role == "policy" else self._critic().engine

    def _save_model(self, module: PackedModule, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write a model folder, in ``dtype`` if given. All ranks gather the weights, and the first rank writes them."""
        model = module.model
        tensors = merged_weights(model)
        with self.actor.engine.ranks.together():
            try:
                if self._is_first:
                    weights = WeightsToSave(weight_shapes(model), self._saved_dtypes(model, dtype), tensors)
                    save_model(model, self.tokenizer, folder, weights, module.processor)
            finally:
                for _ in tensors:  # the other ranks take part in gathering every tensor, even if writing failed
                    pass

    @property
    def _saved_dtype(self) -> torch.dtype | None:
        name = self.config.trainer.checkpoint_dtype
        return None if name == "trained" else DTYPES[name]

    @staticmethod
    def _saved_dtypes(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        return {plain_name(name): dtype or each.dtype for name, each in model.named_parameters()}


def _timed(name: str, model: Actor | Critic, batch: DataProto) -> dict[str, float]:
    """The statistics of an update, its time, and how much of the device it used."""
    began = time.perf_counter()
    stats = model.update(batch)
    seconds, flops, engine = time.perf_counter() - began, stats.pop(FLOPS, 0.0), model.engine
    compared = {key: stats.pop(key) for key in [key for key in stats if key.startswith(GAP)]}
    rated = {f"time/{name}_s": seconds}
    if flops:
        rate = flops / seconds / engine.ranks.count
        rated[f"throughput/{name}_tflops_per_s"] = rate / 1e12
        if engine.peak_flops:
            rated[f"mfu/{name}"] = rate / engine.peak_flops
    return {**{f"{name}/{key}": value for key, value in stats.items()}, **rated, **compared}


def _negative_log_likelihood(outputs: Mapping[str, Tensor], batch: DataProto) -> PolicyLoss:
    return PolicyLoss(-outputs["logprobs"])
