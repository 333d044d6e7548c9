"""Weights straight from the ranks of a learner to engines in other processes or on other machines.

Each rank sends the part of every tensor that it holds (``pieces.py``), over torch process groups (``links.py``), so
nothing is gathered and no process holds the whole model. Control calls tell the engines what comes:

    transport = CollectiveTransport(torch.bfloat16)                  # one for each engine
    transport.send(update, channel, mode)                            # ``update.direct`` is the learner

Several engines that take one update together meet in a ``Rendezvous``: the last one to arrive sends for all of them.
If an engine ends or stops answering, the others get the weights again, in a new group without it.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import torch

from headwater.config.schema import WeightLink
from headwater.core.capabilities import UpdateMode
from headwater.core.errors import HeadwaterError, TransferLost, WaitTimeout, WeightsError, WeightsIncomplete
from headwater.core.parcels import Content, DirectSend, Encoding, Parcel, RankedSource, SendOrder, SendReport
from headwater.core.protocols import WeightUpdate
from headwater.core.waits import wait_for_future, wait_until
from headwater.models.device import DTYPES
from headwater.weights import TRANSPORTS, Channel, ControlCall
from headwater.weights.links import host_store, make_room, own_address
from headwater.weights.pieces import PieceSender

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
"""How long connecting, sending one bucket, and using the weights once all of them were sent, may take. Engines that do
not answer within this time are left out."""
_NCCL_JOIN_S = 5.0
"""How much longer connecting may take for each rank after the first with NCCL."""
_ARRIVE_LIMIT_S = 120.0
"""How long the engines of one update wait for each other. One that is being restarted gets the weights later."""
BUCKET_BYTES = 64 * 2**20
"""What the ranks send together. Both ends hold two buckets at a time, or one tensor that is larger."""
_GIVE_UP_S = 20.0
"""How long an engine may take to answer that a failed update has ended."""
_NUM_ATTEMPTS = 3
"""How often weights are sent to the same engines, if no engine is found that has caused the failure."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@TRANSPORTS.register
class CollectiveTransport:
    """The sender's end for one engine. The group that the engine has joined is used again by the next update."""

    survives_restart = False

    def __init__(self, dtype: torch.dtype, encoding: Encoding = "plain", link: WeightLink = "gloo") -> None:
        self._dtype = dtype
        self._encoding: Encoding = encoding
        self._link: WeightLink = link
        self.joined: tuple[str, str] | None = None
        """The engine's process and the group that it has joined."""

    def send(self, update: WeightUpdate, channel: Channel, mode: UpdateMode | None) -> None:
        direct = update.direct
        if direct is None:  # the weights are not a learner's
            direct = DirectSend(StreamSource(update), "adapters" if update.adapters_alone else "merged")
        with _meeting:
            if direct.rendezvous is None:
                dtype = _DTYPE_NAMES[self._dtype]
                direct.rendezvous = Rendezvous(direct, update.version, dtype, self._encoding, self._link)
        direct.rendezvous.take_part(_Member(self, channel, mode))

    def close(self) -> None:
        self.joined = None


_meeting = threading.Lock()


class StreamSource:
    """A stream of buckets as a learner of one rank, for weights that are not sent by a learner."""

    def __init__(self, update: WeightUpdate) -> None:
        self._update = update
        self._sender = PieceSender(0)
        self.connected: SendOrder | None = None
        self._is_read = False

    def parcels(self, content: Content = "merged") -> list[Parcel]:
        return [Parcel.whole(name, shape) for name, shape in self._update.shapes.items()]

    def connect(self, order: SendOrder) -> list[SendReport]:
        report = self._sender.connect(order)
        self.connected = None if report.failure else order
        return [report]

    def broadcast(self, order: SendOrder, content: Content = "merged") -> list[SendReport]:
        if self._is_read:
            raise TransferLost("the stream of weights was read before; send the update again")
        self._is_read = True
        try:
            return [self._sender.send(order, self.parcels(), self._in_order())]
        finally:
            self._sender.close()

    def _in_order(self) -> Any:
        expected = iter(self._update.shapes.items())
        for bucket in self._update.buckets:
            for name, tensor in bucket:
                announced = next(expected, None)
                if announced != (name, tuple(tensor.shape)):
                    raise WeightsError(f"{name} of shape {tuple(tensor.shape)}: was not announced in this place")
                yield tensor.detach()
        if (missing := next(expected, None)) is not None:
            raise WeightsError(f"{missing[0]} did not arrive")


@dataclass(eq=False)
class _Member:
    """One engine that takes part in an update."""

    transport: CollectiveTransport
    channel: Channel
    mode: UpdateMode | None
    result: Future[None] = field(default_factory=Future)
    is_incomplete: bool = False
    """The present attempt has left it with parts of two versions."""

    @property
    def group(self) -> str:
        """The group that the engine's present process has joined; empty if it has joined none."""
        joined = self.transport.joined
        return joined[1] if joined is not None and joined[0] == self.channel.process else ""

    def joined(self, group: str) -> None:
        self.transport.joined = (self.channel.process, group) if group else None

    def lost(self, error: BaseException) -> None:
        """The engine does not take the weights: they must be sent to it again."""
        self.joined("")
        if not isinstance(error, HeadwaterError) or isinstance(error, WaitTimeout):
            error = TransferLost(f"the engine at {self.channel.url} does not answer during a weight update: {error}")
        if not self.result.done():
            self.result.set_exception(error)


class Rendezvous:
    """Where the engines of one update meet. The thread that brings the last one sends to all of them."""

    def __init__(self, direct: DirectSend, version: int, dtype: str, encoding: Encoding, link: WeightLink) -> None:
        self._direct = direct
        self._learner: RankedSource = direct.learner
        self._version = version
        self._dtype = dtype
        self._encoding = encoding
        self._link = link
        self._changed = threading.Condition()
        self._members: list[_Member] = []
        self._has_begun = False

    def take_part(self, member: _Member) -> None:
        """Return when the engine uses the weights."""
        if members := self._arrive(member):
            try:
                self._send_to(members)
            except BaseException as error:
                for each in members:
                    if not each.result.done():
                        each.result.set_exception(error)
                raise
        wait_for_future(
            member.result,
            lambda: f"the learner's ranks send version {self._version} to {self._direct.num_receivers} engines",
            kind="weights",
            hard_limit_s=2 * member.channel.limit_s + _NUM_ATTEMPTS * self._direct.num_receivers * LIMIT_S,
        )

    def _arrive(self, member: _Member) -> list[_Member]:
        """All members, for the one thread that sends; nothing for the others."""

        def is_settled() -> bool:
            return self._has_begun or len(self._members) >= self._direct.num_receivers

        def describe() -> str:
            return f"{len(self._members)} of {self._direct.num_receivers} engines are ready for weights"

        with self._changed:
            if self._has_begun:
                raise TransferLost("the other engines took these weights without this one; send them again")
            self._members.append(member)
            self._changed.notify_all()
            try:
                wait_until(self._changed, is_settled, describe, kind="weights", hard_limit_s=_ARRIVE_LIMIT_S)
            except WaitTimeout as error:
                logger.warning("%s: they take the weights without the others", error)
            is_first, self._has_begun = not self._has_begun, True
            self._changed.notify_all()
            return list(self._members) if is_first else []

    def _send_to(self, members: list[_Member]) -> None:
        num_left = _NUM_ATTEMPTS
        while members:
            problem = self._attempt(members)
            if not problem:
                return
            remaining = [each for each in members if not each.result.done()]
            num_left -= len(remaining) == len(members)
            if not num_left:
                raise WeightsError(f"version {self._version} could not be sent to {len(members)} engines: {problem}")
            if remaining:
                logger.warning("weights are sent again to %d of %d engines: %s", len(remaining), len(members), problem)
            members = remaining

    def _attempt(self, members: Sequence[_Member]) -> str:
        """Send to all members. Why that failed; empty if it did not. Members that do not answer are ``lost``."""
        for each in members:
            each.is_incomplete = False
        content = self._direct.content
        parcels = self._learner.parcels(content)
        num_senders = len(parcels[0].starts) - 1
        order = self._order(members, num_senders)
        if order is not self._learner.connected and (problem := self._connect(order, members, num_senders)):
            return problem
        starts = [_start_call(self._version, each, parcels, order, content) for each in members]
        if problem := self._everywhere(members, starts, [each.channel.limit_s for each in members]):
            self._abandon(members, problem)
            return problem
        reports: Sequence[SendReport] = ()
        try:
            reports = self._learner.broadcast(order, content)
            problem = next((each.failure for each in reports if each.failure), "")
        except HeadwaterError as error:
            self._abandon(members, str(error))
            raise
        if problem:
            self._abandon(members, problem)
            return problem
        self._direct.reports = reports
        return self._finish(members)

    def _finish(self, members: Sequence[_Member]) -> str:
        """The engines use the weights. One that fails only now does not concern the others."""
        calls = [each.channel.call(ControlCall("/control/finish_weight_update", {})) for each in members]
        problem = self._answers(members, calls, [LIMIT_S] * len(members))
        for each, call in zip(members, calls, strict=True):
            if each.is_incomplete:
                each.joined("")
            elif not each.result.done():
                self._direct.pause_s = max(self._direct.pause_s, call.result().get("pause_s", 0.0))
                _settle(each)
        return problem if any(each.is_incomplete for each in members) else ""

    def _order(self, members: Sequence[_Member], num_senders: int) -> SendOrder:
        """The group that all members have joined together, or a new one."""
        known = self._learner.connected
        is_known = known is not None and known.num_receivers == len(members) and known.dtype == self._dtype
        if known is not None and is_known and all(each.group == known.group for each in members):
            return known
        hosts = {urlsplit(each.channel.url).hostname or "127.0.0.1" for each in members}
        away = next((each for each in sorted(hosts) if own_address(each) != "127.0.0.1"), "127.0.0.1")
        host = own_address(away)
        num_visitors = num_senders * (1 + len(members))
        make_room(num_visitors, f"the store in which {num_senders} ranks and {len(members)} engines meet")
        name = f"headwater-{uuid.uuid4().hex}"
        port = host_store(host).port
        return SendOrder(
            name,
            host,
            port,
            len(members),
            self._dtype,
            backend=self._link,
            bucket_bytes=BUCKET_BYTES,
            limit_s=LIMIT_S,
            encoding=self._encoding,
            extra_connect_s=extra_connect_s(self._link, num_senders),
        )

    def _connect(self, order: SendOrder, members: Sequence[_Member], num_senders: int) -> str:
        joins = [
            ControlCall("/control/join_weight_group", {**asdict(order), "number": number, "num_senders": num_senders})
            for number in range(1, len(members) + 1)
        ]
        calls = [each.channel.call(join) for each, join in zip(members, joins, strict=True)]
        reports = self._learner.connect(order)
        problem = next((each.failure for each in reports if each.failure), "")
        problem = self._answers(members, calls, [_GIVE_UP_S + order.connect_limit_s] * len(members)) or problem
        for each in members:
            each.joined("" if problem else order.group)
        return problem

    def _everywhere(self, members: Sequence[_Member], calls: Sequence[ControlCall], limits: Sequence[float]) -> str:
        started = [each.channel.call(call) for each, call in zip(members, calls, strict=True)]
        return self._answers(members, started, limits)

    def _answers(
        self, members: Sequence[_Member], calls: Sequence[Future[dict[str, Any]]], limits: Sequence[float]
    ) -> str:
        """Wait for all answers. The first problem; empty if there is none."""
        problems = []
        for member, call, limit_s in zip(members, calls, limits, strict=True):
            what = f"the engine at {member.channel.url} answers about version {self._version}"
            try:
                wait_for_future(call, _constant(what), kind="weights", hard_limit_s=limit_s)
            except (TransferLost, WaitTimeout) as error:
                call.cancel()
                member.lost(error)
                problems.append(str(error))
            except WeightsIncomplete as error:
                member.is_incomplete = True
                _tell(member.channel.incomplete)
                problems.append(str(error))
            except (HeadwaterError, CancelledError) as error:
                # Its process is alive and refuses the weights: nothing is gained by sending them again.
                self._abandon(members, str(error))
                raise
        return problems[0] if problems else ""

    def _abandon(self, members: Sequence[_Member], reason: str) -> None:
        """End a failed update everywhere. An engine that does not answer is lost."""
        waiting = [each for each in members if not each.result.done()]
        body = {"error": reason}
        calls = [each.channel.call(ControlCall("/control/finish_weight_update", body)) for each in waiting]
        for member, call in zip(waiting, calls, strict=True):
            member.joined("")
            what = f"the engine at {member.channel.url} ends a failed weight update"
            try:
                answer = wait_for_future(call, _constant(what), kind="weights", hard_limit_s=_GIVE_UP_S)
            except (TransferLost, WaitTimeout) as error:
                call.cancel()
                member.lost(error)
            except (HeadwaterError, CancelledError):
                pass  # it has ended the update itself, and is asked again by the next attempt
            else:
                if answer.get("needs_weights"):
                    _tell(member.channel.incomplete)


def extra_connect_s(link: WeightLink, num_senders: int) -> float:
    """How much longer connecting may take if there are several ranks.

    With NCCL an engine joins their groups one after another, and the last rank waits for it from the beginning.
    """
    return _NCCL_JOIN_S * (num_senders - 1) if link == "nccl" else 0.0


def _start_call(
    version: int, member: _Member, parcels: Sequence[Parcel], order: SendOrder, content: Content
) -> ControlCall:
    tensors = [{"name": each.name, "shape": list(each.shape), "starts": list(each.starts)} for each in parcels]
    body = {
        "version": version,
        "mode": member.mode,
        "tensors": tensors,
        "order": asdict(order),
        "limit_s": member.channel.limit_s,
        "adapters_alone": content == "adapters",
    }
    return ControlCall("/control/start_weight_broadcast", body)


def _settle(member: _Member) -> None:
    try:
        member.channel.accepted(None)
    except TransferLost as error:
        member.lost(error)
    else:
        member.result.set_result(None)


def _tell(what: Callable[[], None]) -> None:
    """Tell an engine something that only matters while its process lives."""
    try:
        what()
    except TransferLost:
        logger.debug("the engine's process has ended", exc_info=True)


def _constant(text: str) -> Callable[[], str]:
    return lambda: text
