"""Where the learner and the servers of a run are: in this process, on the ranks of torchrun, or in a Ray cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from headwater.cluster import keep_ray_local, num_launched
from headwater.core.errors import HeadwaterError, RankFailed

if TYPE_CHECKING:
    from headwater.config.schema import Config
    from headwater.learner.build import LearnerBuilder
    from headwater.trainer.rollout_setup import RemoteParts


@dataclass(frozen=True)
class Site:
    """Where the learner and the servers of a run are."""

    config: Config
    """With the number type that the learner's device has."""
    device: str
    """cuda or cpu: the kind of device that the learner uses."""
    make_learner: LearnerBuilder | None = None
    """Builds the learner over several ranks; None builds it in this process."""
    remote: Callable[[], RemoteParts | None] = lambda: None
    """What of the rollouts runs in a cluster."""
    log_to: Callable[[Path], None] = lambda folder: None
    """Send the output of other processes to files in a folder."""
    is_here: bool = True
    """Whether the learner uses the devices of this machine."""


@contextmanager
def open_site(config: Config, *, is_restart: bool) -> Iterator[Site]:
    """The processes of a run, which end with this block."""
    if config.cluster.kind == "ray":
        with _ray_site(config, is_restart=is_restart) as site:
            yield site
        return
    import torch

    from headwater.models.device import with_dtype

    local = Site(with_dtype(config), "cuda" if torch.cuda.is_available() else "cpu")
    with launched_learner(config) as make_learner:
        yield replace(local, make_learner=make_learner)


@contextmanager
def launched_learner(config: Config) -> Iterator[LearnerBuilder | None]:
    """What builds the learner over the ranks of torchrun, which end with this block; None in a single process."""
    if num_launched() == 1 and config.learner.context_parallel == 1:
        yield None
        return
    from headwater.cluster.torchrun import check_ranks, join
    from headwater.learner.build import build_learner

    check_ranks(config, num_launched())
    # torchrun sends SIGTERM to all ranks when one has ended; rank 0 then reports which.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with closing(join()) as group, rank_failures_named(lambda: group.failure, is_last=True):

        def handle(number: int, frame: FrameType | None) -> None:
            if not group.has_raised:  # otherwise the error is on its way to the user
                raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, handle)
        timeout_s = config.learner.rank_timeout_s
        yield lambda spec: group.build(build_learner, spec, timeout_s=timeout_s)


@contextmanager
def _ray_site(config: Config, *, is_restart: bool) -> Iterator[Site]:
    if num_launched() > 1:
        raise HeadwaterError(
            "cluster.kind = ray: Ray starts the ranks itself (cluster.learner.num_ranks); start the run without "
            "torchrun"
        )
    keep_ray_local()
    from headwater.cluster.ray import RayCluster
    from headwater.config.paths import with_absolute_paths
    from headwater.trainer.rollout_setup import RemoteParts

    joined = RayCluster.join(config, is_restart=is_restart)
    with closing(joined) as cluster, rank_failures_named(lambda: cluster.failure):
        yield Site(
            with_absolute_paths(cluster.with_dtype(config)),  # actors have other working directories
            "cuda" if cluster.has_gpus else "cpu",
            cluster.build,
            lambda: RemoteParts(cluster.places(), cluster.reward_pool(), cluster.weight_transfer(), cluster.tools()),
            cluster.log_to,
            is_here=False,
        )


@contextmanager
def rank_failures_named(failure: Callable[[], str], *, is_last: bool = False) -> Iterator[None]:
    """An interrupt may mean that a rank has ended; then that is the error.

    ``is_last`` says that the process ends with that error. The launcher and the watch of ranks both interrupt this
    process, so a second signal may arrive while the error is on its way to the user; it is then ignored.
    """
    try:
        yield
    except (KeyboardInterrupt, RankFailed) as error:
        handlers = _ignore_interrupts() if is_last else {}
        text = failure()
        if not text:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            raise
        if isinstance(error, RankFailed):
            raise
        raise RankFailed(text) from None


def _ignore_interrupts() -> dict[signal.Signals, Any]:
    """The handlers that were replaced."""
    return {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
