"""A policy version on its way from a learner to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from headwater.core.parcels import DirectSend

Bucket: TypeAlias = "Sequence[tuple[str, torch.Tensor]]"
"""Some named tensors of a model, in Hugging Face names: at most about 256 MiB, or one larger tensor alone."""


class WeightFile(Protocol):
    """A version that was written to a file once, for several engines (``weights.file``)."""

    @property
    def path(self) -> Path: ...
    def hold(self) -> WeightFile:
        """Keep the file until one more ``discard``."""
        ...

    def discard(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One policy version on its way to an engine, as a stream of buckets.

    An engine checks ``shapes`` before it changes a weight. It then iterates ``buckets`` once, on one thread. The
    tensors of a bucket are valid until the next bucket is requested.
    """

    version: int
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every tensor of the model, by name."""
    buckets: Iterable[Bucket]
    is_repeat: bool = False
    """The same weights were published as this version before. Only engines that do not have them need to take them."""
    direct: DirectSend | None = None
    """The learner, if its ranks can send the weights themselves. An engine then need not read ``buckets``."""
    file: WeightFile | None = None
    """Where the weights are already, for engines that read files (``Capabilities.file_weights``)."""
    adapters_alone: bool = False
    """Only the LoRA adapters, for an engine that has the other weights already (``Capabilities.adapters``)."""
    again: Callable[[], Iterator[Bucket]] | None = None
    """Exports the same buckets once more, for servers that take the weights one after another."""

    @classmethod
    def of(cls, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """An update of tensors that are all in memory already, as one bucket."""
        bucket = list(tensors)
        return cls(version, {name: tuple(tensor.shape) for name, tensor in bucket}, [bucket])

    def close(self) -> None:
        """End a stream that is not read to its end, so that its sender can release what it holds."""
        close = getattr(self.buckets, "close", None)
        if close is not None:
            close()


class WeightSource(Protocol):
    """What publishing needs from a learner."""

    def export(self) -> Iterator[Bucket]:
        """All weights of the policy, bucket by bucket; never the whole model in one list."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor that ``export`` yields, by name."""
        ...


class AdapterSource(WeightSource, Protocol):
    """What publishing adapters alone needs from a learner."""

    def export_unmerged(self, adapters_alone: bool) -> Iterator[Bucket]:
        """The adapters, named after their layers with ``.lora_A`` and ``.lora_B``, and before them all other weights
        unless ``adapters_alone``."""
        ...

    def unmerged_shapes(self, adapters_alone: bool) -> Mapping[str, tuple[int, ...]]:
        """The names and shapes that ``export_unmerged`` yields."""
        ...
