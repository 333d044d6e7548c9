"""Send one weight update to all servers of a router, over one stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from headwater.backends.router.member import Member
from headwater.core.errors import HeadwaterError, TransferLost, WeightsError
from headwater.core.protocols import UpdateMode, WeightUpdate
from headwater.core.waits import wait_for_future
from headwater.weights.fan_out import FanOut

logger = logging.getLogger(__name__)

DIRECT_LIMIT_S = 600.0
"""Per server, for weights that the learner's ranks send themselves. They have stricter limits for every bucket."""


def send_to_all(
    update: WeightUpdate,
    mode: UpdateMode | None,
    members: Mapping[str, Member],
    on_end: Callable[[Member, BaseException | None], None],
    *,
    start_limit_s: float,
    bucket_limit_s: float,
) -> None:
    """Return when every server has the weights, has failed, or was dropped because it was too slow.

    ``on_end`` is called once for each of them, as soon as it is known. Raises if no server has the new weights.
    """
    is_direct = all(each.engine.capabilities.direct_weights for each in members.values())
    if update.direct is not None and is_direct:
        update.direct.num_receivers = len(members)
    else:
        update, is_direct = replace(update, direct=None), False
    fan_out = FanOut(update, list(members), start_limit_s=start_limit_s, bucket_limit_s=bucket_limit_s)
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
        futures[name] = member.engine.update_weights(fan_out.update_for(name), mode)
        futures[name].add_done_callback(partial(take_end, name))
    if not is_direct:  # otherwise the learner's ranks send the weights, and nothing reads the stream
        for name, reason in fan_out.run().items():
            end(name, TransferLost(f"it {reason}"))
    limit_s = start_limit_s + DIRECT_LIMIT_S * len(members) if is_direct else bucket_limit_s
    for name, future in futures.items():
        if name not in results:
            _await_end(name, future, update.version, limit_s, end)
    _raise_if_none(results)


def _await_end(
    name: str, future: Future[None], version: int, limit_s: float, end: Callable[[str, BaseException | None], None]
) -> None:
    """Wait until a server that has been given all weights uses them."""
    try:
        wait_for_future(
            future,
            lambda: f"server {name} takes the weights of version {version}",
            kind="weights",
            hard_limit_s=limit_s,
        )
    except HeadwaterError as error:
        end(name, error)
    else:
        end(name, None)


def _raise_if_none(results: Mapping[str, BaseException | None]) -> None:
    """One server with the new weights is enough: the others get them again when they are back."""
    failures = {name: error for name, error in results.items() if error is not None}
    for name, error in failures.items():
        logger.warning("server %s did not take the weights: %s", name, error)
    if failures and len(failures) == len(results):
        # A loss can be repaired by sending the weights again, a refusal cannot.
        raise min(failures.values(), key=lambda error: not isinstance(error, TransferLost))
