"""The engine of a run: one in this process, one server, or a router over several."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from headwater.backends import BACKENDS, SERVER_KEY, BackendContext, LaunchesServers, LoadsModels, engine_device
from headwater.config.schema import Config
from headwater.config.server_checks import backend_traits, chosen_transfer, supported_transfers, transfer_problem
from headwater.core.errors import ConfigError, RolloutFailed
from headwater.core.protocols import InferenceEngine
from headwater.core.waits import start_in_thread
from headwater.models.device import resolve_device

if TYPE_CHECKING:
    from headwater.backends.router.engine import RoutedServer

Start = Callable[[], InferenceEngine]

_REACH_S = 10.0
"""How long a server that is to join a run may take to answer for the first time."""


def make_fleet(context: BackendContext) -> InferenceEngine:
    """Load the engine, connect to the servers of ``rollout.servers``, or start those of ``rollout.launch``."""
    rollout = context.config.rollout
    backend = BACKENDS.resolve(rollout.backend)
    if not rollout.is_separate and not context.places:
        engine: InferenceEngine = backend.from_context(context)
        return engine
    check_weight_link(context.config)
    num_servers = len(rollout.servers) or len(context.places) or rollout.launch.count
    context = replace(context, is_one_of_many=num_servers > 1)
    if rollout.servers:
        starts = {url.rstrip("/"): partial(backend.connect, url.rstrip("/"), context) for url in rollout.servers}
    elif context.places:
        launch = _launcher(backend, rollout.backend)
        starts = {
            place.name: partial(launch, replace(context, places=(place,)), place.devices) for place in context.places
        }
    else:
        launch = _launcher(backend, rollout.backend)
        starts = {
            f"server {place}": partial(launch, context, devices)
            for place, devices in enumerate(devices_of_servers(context.config))
        }
    engines = _start_all(list(starts.values()))
    if num_servers == 1:
        return engines[0]
    from headwater.backends.router.engine import RoutedServer, RouterEngine, RouterOptions

    # A server that the run has started may have another address after a restart, so its name is its place.
    # A running server that was given up may come back, and so may a node of a cluster. One that the run starts on this
    # machine was restarted often enough.
    again = starts if rollout.servers or context.places else {}
    return RouterEngine(
        [RoutedServer(name, engine, connect=again.get(name)) for name, engine in zip(starts, engines, strict=True)],
        RouterOptions(weight_folder=rollout.weight_folder, update_order=rollout.update_order, keeps_one=True),
    )


def connect_server(context: BackendContext, url: str) -> RoutedServer:
    """Connect to a running server that is to join the router of a run, with the checks of ``rollout.servers``."""
    from headwater.backends.router.engine import RoutedServer

    rollout = context.config.rollout
    told = rollout.weight_transfer
    if not backend_traits(context.config).is_foreign:  # ours take an update together, in the same way
        told = chosen_transfer(context.config) or "shared_memory"
    alone = replace(context.config, rollout=replace(rollout, servers=(url,), weight_transfer=told))
    transfer = chosen_transfer(alone) or supported_transfers(alone)[-1]
    if (problem := transfer_problem(alone, transfer)) is not None:
        raise ConfigError([f"rollout.weight_transfer = {transfer}: {problem}, and resume the run with it"])
    _reach(url)
    backend = BACKENDS.resolve(rollout.backend)
    if not hasattr(backend, "connect"):  # its servers are those of ``headwater serve``
        from headwater.backends.native.engine import NativeEngine

        backend = NativeEngine
    connect = partial(backend.connect, url, replace(context, config=alone, is_one_of_many=True, places=()))
    return RoutedServer(url, connect(), connect=connect)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the server with this address only."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _reach(url: str) -> None:
    """Fail soon if nothing is there. A server of the recipe is waited for, because it may still be starting."""
    key = os.environ.get(SERVER_KEY, "")
    asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect).open(asked, timeout=_REACH_S).close()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise RolloutFailed(
                f"{url} refuses access ({error.code}): its key must be in {SERVER_KEY} of the environment in which the "
                "run was started"
            ) from error
        # Other answers are judged by the backend.
    except (OSError, ValueError, HTTPException) as error:
        raise RolloutFailed(f"{url} cannot be reached: {error}; start it first, or correct the address") from error


def devices_of_servers(config: Config) -> list[tuple[str, ...]]:
    """The devices of every server that the run starts."""
    launch, size = config.rollout.launch, config.rollout.launch.tensor_parallel
    wanted = launch.devices or (config.rollout.device,) * (launch.count * size)
    # Resolved here, so that a device that does not exist is reported before a server starts.
    devices = [engine_device(each, config.model.device, place)[0] for place, each in enumerate(wanted)]
    return [tuple(devices[first : first + size]) for first in range(0, len(devices), size)]


def check_weight_link(config: Config) -> None:
    """Refuse ``rollout.weight_link=nccl`` if a learner rank and a server, or two servers, would share a GPU.

    Of servers that run already the GPUs are not known; NCCL then names the GPU when the group is joined. In a Ray
    cluster, ``cluster.resources`` checks this.
    """
    if config.rollout.weight_link != "nccl" or config.cluster.kind != "local":
        return
    told, remedy = "rollout.weight_link = nccl", "use rollout.weight_link=gloo"
    if resolve_device(config.model.device).type != "cuda":
        raise ConfigError(
            [f"{told}: NCCL sends from GPU to GPU, and the learner uses none (no CUDA device is available); {remedy}"]
        )
    devices = [] if config.rollout.servers else [each for server in devices_of_servers(config) for each in server]
    problems = []
    if "cpu" in devices:
        problems.append(f"{told}: NCCL sends from GPU to GPU, and a server would run on the CPU; {remedy}")
    shared = sorted({each for each in devices if each != "cpu" and engine_device(each, config.model.device)[1]})
    if shared:
        problems.append(
            f"{told}: NCCL needs a separate GPU for every learner rank and every server, and a server would share "
            f"{', '.join(shared)} with the learner; {remedy}, or name other GPUs in rollout.launch.devices"
        )
    if twice := sorted({each for each in devices if devices.count(each) > 1 and each not in ("cpu", *shared)}):
        problems.append(
            f"{told}: NCCL needs a separate GPU for every server, and several would share {', '.join(twice)}; "
            f"{remedy}, or lower rollout.launch.num_servers"
        )
    if problems:
        raise ConfigError(problems)


def _launcher(backend: Any, name: str) -> Callable[[BackendContext, Sequence[str]], InferenceEngine]:
    if isinstance(backend, LaunchesServers):
        return backend.launch
    if not isinstance(backend, LoadsModels):
        raise ConfigError(
            [
                f"rollout.placement = disaggregated: rollout.backend = {name} cannot be served, because it has no "
                "method load(model_path, ...); use rollout.placement=colocated"
            ]
        )
    from headwater.backends.native.engine import NativeEngine

    return NativeEngine.launch


def _start_all(starts: Sequence[Start]) -> list[InferenceEngine]:
    """Start or connect to all servers at the same time, because each may take minutes. If one fails, close the rest."""
    if len(starts) == 1:
        return [starts[0]()]
    started = [start_in_thread(start, "headwater-fleet") for start in starts]
    try:
        wait(started)
    except BaseException:  # an interrupt must not last until all of them have loaded their models
        for each in started:
            each.add_done_callback(_close_started)
        raise
    errors = [error for each in started if (error := each.exception()) is not None]
    if errors:
        for each in started:
            _close_started(each)
        raise errors[0]
    return [each.result() for each in started]


def _close_started(start: Future[InferenceEngine]) -> None:
    if start.exception() is None:
        start.result().close()
