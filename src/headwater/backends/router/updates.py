"""Send one weight update to all servers of a router, over one stream or through one file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from headwater.backends.router.member import Member
from headwater.backends.router.roster import RouterOptions
from headwater.core.errors import HeadwaterError, TransferLost, WeightsError
from headwater.core.protocols import UpdateMode, WeightUpdate
from headwater.core.waits import wait_for_future
from headwater.models.checksum import dtype_of_checksum
from headwater.weights.fan_out import FanOut
from headwater.weights.file import written_file

logger = logging.getLogger(__name__)

WHOLE_LIMIT_S = 600.0
"""Per server, for weights that it does not read from the stream: the learner's ranks send them, with stricter limits
for every bucket, or it loads a file."""


def send_to_all(
    update: WeightUpdate,
    mode: UpdateMode | None,
    members: Mapping[str, Member],
    on_end: Callable[[Member, BaseException | None], None],
    options: RouterOptions,
) -> None:
    """Return when every server has the weights, has failed, or was dropped because it was too slow.

    ``on_end`` is called once for each of them, as soon as it is known. Raises if no server has the new weights.
    """
    with ExitStack() as held:
        update, is_streamed = _prepare(update, members, options.weight_folder, held)
        _send(update, mode, members, on_end, options, is_streamed)


def _prepare(
    update: WeightUpdate, members: Mapping[str, Member], weight_folder: str, held: ExitStack
) -> tuple[WeightUpdate, bool]:
    """The update as the servers take it, and whether they read its stream.

    They do not if all of them take the weights from the learner's ranks, or from a file, which is written here once.
    """
    can = [each.engine.capabilities for each in members.values()]
    if update.direct is not None and all(each.direct_weights for each in can):
        update.direct.num_receivers = len(members)
        return update, False
    if all(each.file_weights for each in can):
        file = written_file(update, dtype_of_checksum(can[0].dtype), weight_folder)
        held.callback(file.discard)
        return replace(update, direct=None, buckets=(), file=file), False
    return replace(update, direct=None), True


def _send(
    update: WeightUpdate,
    mode: UpdateMode | None,
    members: Mapping[str, Member],
    on_end: Callable[[Member, BaseException | None], None],
    options: RouterOptions,
    is_streamed: bool,
) -> None:
    start_limit_s, bucket_limit_s = options.update_start_limit_s, options.update_bucket_limit_s
    fan_out = FanOut(
        update,
        list(members),
        start_limit_s=start_limit_s,
        bucket_limit_s=bucket_limit_s,
        why_lost=lambda name: members[name].lost,
    )
    results: dict[str, BaseException | None] = {}

    def end(name: str, error: BaseException | None) -> None:
        if name not in results:
            results[name] = error
            on_end(members[name], error)

    def take_end(name: str, done: Future[None]) -> None:
        fan_out.leave(name)
        end(name, done.exception() if not done.cancelled() else WeightsError("the update was cancelled"))

    futures: dict[str, Future[None]] = {}
    for name, member in members.items():
        futures[name] = member.engine.update_weights(fan_out.update_for(name) if is_streamed else update, mode)
        futures[name].add_done_callback(partial(take_end, name))
    if is_streamed:
        for name, reason in fan_out.run().items():
            end(name, TransferLost(f"it {reason}"))
    limit_s = bucket_limit_s if is_streamed else start_limit_s + WHOLE_LIMIT_S * len(members)
    for name, future in futures.items():
        if name not in results:
            end(name, _error_of(members[name], future, update.version, limit_s))
    _raise_if_none(results)


def _error_of(member: Member, future: Future[None], version: int, limit_s: float) -> BaseException | None:
    """Wait until a server that was given the weights uses them. Why it does not; None if it does."""

    def stop_if_lost() -> None:
        if member.lost and not future.done():
            raise TransferLost(f"it was lost: {member.lost}")

    try:
        wait_for_future(
            future,
            lambda: f"server {member.name} takes the weights of version {version}",
            kind="weights",
            hard_limit_s=limit_s,
            while_waiting=stop_if_lost,
        )
    except HeadwaterError as error:
        return error
    return None


def _raise_if_none(results: Mapping[str, BaseException | None]) -> None:
    """One server with the new weights is enough: the others get them again when they are back."""
    failures = {name: error for name, error in results.items() if error is not None}
    for name, error in failures.items():
        logger.warning("server %s did not take the weights: %s", name, error)
    if failures and len(failures) == len(results):
        # A loss can be repaired by sending the weights again, a refusal cannot.
        raise min(failures.values(), key=lambda error: not isinstance(error, TransferLost))
