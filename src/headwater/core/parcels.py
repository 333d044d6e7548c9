"""How the ranks of a learner send their parts of the weights to engines themselves, without gathering them first.

A ``Parcel`` says which rank sends which elements of a tensor. The trainer tells every rank with a ``SendOrder``, and
every rank answers with a ``SendReport``. ``weights.collective`` has both ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Encoding = Literal["plain", "delta"]
"""``delta`` sends the difference from the weights that were sent before, compressed (``weights.delta``)."""

Content = Literal["merged", "unmerged", "adapters"]
"""Which tensors a learner sends: all weights with LoRA adapters merged into them, all weights with the adapters beside
them, or the adapters alone (``rollout.publish=adapter``)."""

BUCKET_BYTES = 64 * 2**20
"""What a rank sends at once, unless an order says otherwise."""
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Parcel:
    """One tensor, and which of its elements each rank sends."""

    name: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    """Rank ``r`` sends the elements from ``starts[r]`` to ``starts[r + 1]``, in the order of memory."""

    def __post_init__(self) -> None:
        if len(self.starts) < 2 or self.starts[0] != 0 or self.starts[-1] != math.prod(self.shape):
            raise ValueError(f"{self.name} of shape {self.shape}: the ranks' parts {self.starts} do not cover it")
        if any(begin > end for begin, end in zip(self.starts, self.starts[1:], strict=False)):
            raise ValueError(f"{self.name}: the ranks' parts {self.starts} overlap")

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], num_ranks: int = 1) -> Parcel:
        """A tensor that the first rank sends alone."""
        return cls(name, tuple(shape), (0, *[math.prod(shape)] * num_ranks))

    def size(self, rank: int) -> int:
        """The number of elements that a rank sends."""
        return self.starts[rank + 1] - self.starts[rank]


@dataclass(frozen=True, slots=True)
class SendOrder:
    """What the ranks of a learner are asked to send, and to whom."""

    group: str
    """The name of the group of ranks and engines. A new group has a new name."""
    host: str
    """Where the group's members find each other: the address of a torch ``TCPStore``."""
    port: int
    num_receivers: int
    dtype: str
    """The number type in which weights are sent, for example ``bfloat16``."""
    backend: str = "gloo"
    bucket_bytes: int = BUCKET_BYTES
    limit_s: float = LIMIT_S
    """How long connecting, and sending one bucket, may take."""
    encoding: Encoding = "plain"
    extra_connect_s: float = 0.0
    """How much longer connecting may take."""

    @property
    def connect_limit_s(self) -> float:
        return self.limit_s + self.extra_connect_s


@dataclass(frozen=True, slots=True)
class SendReport:
    """What one rank has sent."""

    num_bytes: int = 0
    """To each engine."""
    seconds: float = 0.0
    serving: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """The sums from which the checksum is computed (``models.checksum``), in the number type that was sent."""
    trained: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """The same in the learner's number type."""
    failure: str = ""
    """Why the weights did not arrive everywhere. A rank does not raise: the other ranks would wait for it."""


@runtime_checkable
class RankedSource(Protocol):
    """A learner whose ranks can send weights themselves."""

    @property
    def connected(self) -> SendOrder | None:
        """The order of the group that all ranks are members of; None after a failure."""
        ...

    def parcels(self, content: Content = "merged") -> Sequence[Parcel]:
        """Every tensor of the policy, in the order in which it is sent."""
        ...

    def connect(self, order: SendOrder) -> Sequence[SendReport]:
        """Join the order's group on every rank."""
        ...

    def broadcast(self, order: SendOrder, content: Content = "merged") -> Sequence[SendReport]:
        """Send the policy to the members of the group that was joined last. One report per rank."""
        ...


@dataclass
class DirectSend:
    """One update that a learner's ranks may send to several engines at once."""

    learner: RankedSource
    content: Content = "merged"
    num_receivers: int = 1
    """How many engines take this update together. A router sets it before it gives the update to its engines."""
    reports: Sequence[SendReport] = ()
    """What was sent, if it was sent in this way."""
    pause_s: float = 0.0
    """The longest time for which an engine did not generate."""
    rendezvous: Any = None
    """Where the engines' transports meet."""
