"""The learner: holds and trains the models. Any class with these methods can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from headwater.core.protocols import Bucket

if TYPE_CHECKING:
    import torch

    from headwater.core.data_proto import DataProto
    from headwater.core.parcels import Content, Parcel, SendOrder, SendReport

Role = Literal["policy", "critic"]
"""The models that a learner trains."""

MEASURES_ITSELF = "measures_itself"
"""Entry of a batch's ``meta_info``: whether an update computes the column ``old_logprobs`` itself, which is missing."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One process of a learner."""

    rank: int
    host: str
    pid: int
    device: str
    peak_memory_bytes: int = 0
    """The most memory of the device that was ever allocated; on a CPU, the most memory of the process."""
    state: str = "idle"
    """In words, for example ``idle``, ``executes update for 12 s`` or ``ended: killed``."""
    last_call: str = ""
    """The last call that it has completed, and how long that took."""
    is_alive: bool = True
    """False after the process has ended."""
    alive_at: float | None = None
    """When it was last known to run, in seconds since the epoch; None while it runs."""


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """The state of a learner."""

    num_ranks: int
    device: str
    num_optimizer_steps: int
    """Optimiser steps of the policy."""
    learning_rate: float
    """The rate of the policy's next optimiser step."""
    memory_bytes: int
    """Memory of the device that is allocated, of the rank with the most; 0 on a CPU."""
    recorded_bytes: int = 0
    """Memory of the device that recorded passes hold (``learner.cuda_graphs``), of the rank with the most."""
    pass_tokens: int = 0
    """Tokens of the largest pass with gradients that the last mini-batch needed. 0 if there was none."""
    forward_pass_tokens: int = 0
    """The same for passes without gradients."""
    failure: str = ""
    """Why the learner cannot be used any more, such as a rank that has ended. Empty while it works."""
    ranks: tuple[RankStatus, ...] = ()


class SavedLater(Protocol):
    """The state of a learner at one moment."""

    def write(self) -> None:
        """Write it as ``Learner.save`` does, on any thread, and return when all files are there."""
        ...


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """What a profile records, and where it is written."""

    folder: Path
    """An absolute path."""
    name: str
    """The beginning of the files' names, such as ``step_000003``."""
    ranks: tuple[int, ...]
    """The ranks that are recorded."""
    memory: bool
    """Whether allocations are recorded too."""


class Learner(Protocol):
    """Holds the policy, the critic, the reference and the reward model, and trains the first two.

    One process (``learner.learner.LocalLearner``) or several (``cluster.group.LearnerGroup``). All calls take and
    return values that can be serialised, except ``snapshot``, whose result writes what this process holds.
    """

    def compute(self, batch: DataProto, what: Sequence[str]) -> dict[str, torch.Tensor]:
        """Columns for the rows of ``batch``.

        ``logprobs`` also gives ``entropy`` and ``sum_pi_squared``. ``reference_logprobs`` and ``values`` are
        ``[samples, response]``, and ``reward_model`` scores the column ``conversation``, ``[samples]``.
        """
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """Train the critic, then, after ``critic.num_warmup_steps``, the policy; returns ``critic/*`` and ``actor/*``.

        ``batch.meta_info["version"]`` is the number of steps the policy has been trained. With
        ``algorithm.old_logprobs=recompute`` and a single epoch, the column ``old_logprobs`` may be missing if
        ``meta_info[MEASURES_ITSELF]`` is true.
        """
        ...

    def supervise(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step of the warm start, which increases the likelihood of the batch's responses."""
        ...

    def keep_reference(self, folder: Path) -> None:
        """Make the present policy the reference, and save it in ``folder`` for a resumed run. Ends the warm start."""
        ...

    def export(self, role: Role = "policy") -> Iterator[Bucket]:
        """All weights in Hugging Face names, in buckets, with adapters merged. It must be drained or closed."""
        ...

    def shapes(self, role: Role = "policy") -> Mapping[str, tuple[int, ...]]:
        """The names and shapes that ``export`` yields."""
        ...

    def export_unmerged(self, adapters_alone: bool) -> Iterator[Bucket]:
        """LoRA adapters and the frozen weights, or ``adapters_alone``. It must be drained or closed."""
        ...

    def unmerged_shapes(self, adapters_alone: bool) -> Mapping[str, tuple[int, ...]]:
        """The names and shapes that ``export_unmerged`` yields."""
        ...

    @property
    def connected(self) -> SendOrder | None:
        """The group of engines that all ranks can send to; None before ``connect`` and after a failure."""
        ...

    def parcels(self, content: Content = "merged") -> Sequence[Parcel]:
        """Every tensor that ``export`` or ``export_unmerged`` yields, and which rank sends which part of it."""
        ...

    def connect(self, order: SendOrder) -> Sequence[SendReport]:
        """Join a group of engines on every rank (``weights.collective``). One report per rank."""
        ...

    def broadcast(self, order: SendOrder, content: Content = "merged") -> Sequence[SendReport]:
        """Every rank sends its part of the policy to the engines. Nothing is gathered."""
        ...

    def checksum(self, role: Role = "policy") -> str:
        """A text that identifies the trained weights, adapters as they are. The number of ranks does not change it."""
        ...

    def save(self, folder: Path) -> None:
        """Write the state of training, and the policy as ``model/`` in the Hugging Face format."""
        ...

    def prepare_snapshot(self) -> None:
        """Start to allocate, on another thread, the main memory that ``snapshot`` copies to."""
        ...

    def snapshot(self, folder: Path) -> SavedLater | None:
        """A copy of what ``save`` writes, to be written to ``folder`` while training continues; None if this learner
        can only ``save``. The folder exists. The copy is valid until the next one is taken."""
        ...

    def load(self, folder: Path) -> None: ...
    def profile(self, order: ProfileOrder | None) -> None:
        """Record what the learner computes, until the next call with None, which writes the files."""
        ...

    def prepare_offload(self) -> None:
        """Start to copy the weights to main memory, so that ``offload`` takes less time. They must not change before
        it, or the copy is made again."""
        ...

    def offload(self) -> None:
        """Move everything to main memory, to make room for a rollout on the same device."""
        ...

    def onload(self) -> None: ...
    def status(self) -> LearnerStatus: ...
    def close(self) -> None: ...
