"""Send one weight update to all servers of a router, over one stream or through one file.

All servers take it at the same time, or one after another while the others generate. A server that has joined others
and has not taken weights yet is always sent them alone: if it cannot take them, the others have lost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from headwater.backends.router.member import Member
from headwater.backends.router.options import RouterOptions
from headwater.core.capabilities import UpdateMode
from headwater.core.errors import HeadwaterError, TransferLost, WeightsError
from headwater.core.parcels import DirectSend
from headwater.core.protocols import WeightFile, WeightUpdate
from headwater.core.waits import wait_for_future
from headwater.models.checksum import dtype_of_checksum
from headwater.weights.adapter_files import written_adapters
from headwater.weights.fan_out import FanOut
from headwater.weights.file import written_file

WHOLE_LIMIT_S = 600.0
"""Per server, for weights that it does not read from the stream: the learner's ranks send them, with stricter limits
for every bucket, or it loads a file."""


Results = dict[str, BaseException | None]
"""Why each server did not take the weights; None if it did."""


def send_to_all(
    update: WeightUpdate,
    mode: UpdateMode | None,
    members: Mapping[str, Member],
    on_end: Callable[[Member, BaseException | None], None],
    options: RouterOptions,
) -> Results:
    """Return when every server has the weights, has failed, or was dropped because it was too slow.

    ``on_end`` is called once for each of them, as soon as it is known.
    """
    results: Results = {}
    with ExitStack() as held:
        prepared, is_streamed = _prepare(update, members, options.weight_folder, held)
        groups = _groups(members, is_repeatable=_is_repeatable(prepared, is_streamed))
        for group in groups:
            its = prepared
            if len(groups) > 1:
                its = _for_some(prepared, is_streamed, is_first=not results, num_receivers=len(group))
            results |= _send(its, mode, group, on_end, options, is_streamed)
            _keep_report(update, its)
    return results


def _groups(members: Mapping[str, Member], *, is_repeatable: bool) -> list[Mapping[str, Member]]:
    """Who takes the weights together: all that have taken some before, and then each of the others alone."""
    new = {name: each for name, each in members.items() if each.is_new}
    if not new or not is_repeatable:
        return [members]
    known = {name: each for name, each in members.items() if name not in new}
    return [*([known] if known else []), *({name: each} for name, each in new.items())]


def send_in_turn(
    update: WeightUpdate,
    mode: UpdateMode | None,
    members: Mapping[str, Member],
    on_begin: Callable[[Member], None],
    on_end: Callable[[Member, BaseException | None], None],
    options: RouterOptions,
) -> Results:
    """As ``send_to_all``, one server after another. ``on_begin`` is called when it is a server's turn."""
    results: Results = {}
    skipped: set[str] = set()
    with ExitStack() as held:
        prepared, is_streamed = _prepare(update, members, options.weight_folder, held)
        for name, member in members.items():
            if member.lost:
                skipped.add(name)
                results[name] = TransferLost(f"it was lost: {member.lost}")
                on_end(member, results[name])
                continue
            on_begin(member)
            its = _for_some(prepared, is_streamed, is_first=results.keys() <= skipped, num_receivers=1)
            results |= _send(its, mode, {name: member}, on_end, options, is_streamed)
            _keep_report(update, its)
    return results


def _is_repeatable(update: WeightUpdate, is_streamed: bool) -> bool:
    """Whether servers can take an update one after another."""
    is_read_once = update.direct is None and is_streamed and not isinstance(update.buckets, Sequence)
    return not is_read_once or update.again is not None


def _for_some(update: WeightUpdate, is_streamed: bool, *, is_first: bool, num_receivers: int) -> WeightUpdate:
    """The update for some servers of several, with a stream that was not read yet."""
    if update.direct is not None:
        return replace(update, direct=DirectSend(update.direct.learner, update.direct.content, num_receivers))
    if is_first or not is_streamed or isinstance(update.buckets, Sequence):
        return update
    if update.again is None:
        raise WeightsError(
            "the stream of weights can be read only once, so servers cannot take it one after another; use "
            'update_order="together"'
        )
    return replace(update, buckets=update.again())


def _keep_report(update: WeightUpdate, its: WeightUpdate) -> None:
    """What the learner's ranks have sent to one server, for the one who published the update."""
    if update.direct is not None and its.direct is not None and its.direct.reports:
        update.direct.reports = its.direct.reports
        update.direct.pause_s = max(update.direct.pause_s, its.direct.pause_s)


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
        dtype, alpha = dtype_of_checksum(can[0].dtype), can[0].peft_alpha
        file: WeightFile
        if alpha:
            file = written_adapters(update, dtype, alpha=alpha, shared_folder=weight_folder)
        else:
            file = written_file(update, dtype, weight_folder)
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
) -> Results:
    is_first = all(each.is_new for each in members.values())
    start_limit_s = options.update_new_start_limit_s if is_first else options.update_start_limit_s
    bucket_limit_s = options.update_bucket_limit_s
    fan_out = FanOut(
        update,
        list(members),
        start_limit_s=start_limit_s,
        bucket_limit_s=bucket_limit_s,
        why_lost=lambda name: members[name].lost,
    )
    results: Results = {}
    ending = threading.Lock()

    def end(name: str, error: BaseException | None) -> None:
        with ending:  # also while ``on_end`` runs: told after this update, it would undo what a later one says
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
        end(name, results.get(name) or _error_of(members[name], future, update.version, limit_s))
    return results


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
