"""A run on a Ray cluster: Ray places the actors and notices their end, torch.distributed connects the learner ranks.

    with closing(RayCluster.join(config)) as cluster:       # the cluster of RAY_ADDRESS, or one on this machine
        learner = cluster.build(spec)                       # ranks as actors (``ray_ranks.py``)
        rollout = build_rollout(..., places=cluster.places())   # servers in actors (``ray_servers.py``)
        cluster.log_to(run.path / "logs")

The training loop runs in this process, the driver. Resources are reserved by placement groups before anything starts:
one for all learner ranks, and one for each server, so that a server can be placed elsewhere when its node leaves.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from headwater.backends import ServerPlace
from headwater.cluster.resources import (
    Need,
    Node,
    Room,
    needs_of,
    num_servers,
    shares_learner,
    shortages,
    without_gpus,
)
from headwater.config.paths import looks_like_folder, with_absolute_paths
from headwater.config.schema import Config, WeightTransfer
from headwater.config.server_checks import backend_traits, supported_transfers
from headwater.core.errors import ConfigError, HeadwaterError, WaitTimeout
from headwater.core.waits import wait_until
from headwater.data.media import MediaSettings

try:
    import ray
except ImportError as error:
    raise HeadwaterError(
        "cluster.kind = ray: Ray is not installed; install it with pip install 'headwater[ray]'"
    ) from error
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headwater.cluster.ray_actor import EVENTS, ActorPlace, ActorPool
from headwater.cluster.ray_ranks import RayRanks
from headwater.cluster.ray_servers import RayChild, ServerSlot
from headwater.cluster.ray_workers import RayRewardPool, RayTools

if TYPE_CHECKING:
    from headwater.core.learner import Learner
    from headwater.learner.build import LearnerSpec

logger = logging.getLogger(__name__)

LEARNER_SHARE = 0.5
"""Of a GPU that a learner rank and a server share. Ray only counts it."""
_FREE_LIMIT_S = 60.0
"""How long the run waits for resources that other actors still use, such as those of a run that has just ended."""
_LOOK_S = 1.0
_NUM_STARTS = 3


class RayCluster:
    """The actors of one run."""

    def __init__(self, config: Config, needs: Sequence[Need]) -> None:
        self._config = config
        self._needs = {need.what: need for need in needs}
        self._groups: list[Any] = []
        self._ranks: RayRanks | None = None
        self._events: Path | None = None
        self._told: list[str] = []
        self._learner_group: Any = None
        self._slots: list[ServerSlot] = []
        self._pools: list[ActorPool] = []

    @classmethod
    def join(cls, config: Config, *, is_restart: bool = False) -> RayCluster:
        """Connect to Ray, check that the cluster has room for the run, and start the learner ranks.

        A run that is restarted waits for a while, because a node that has left may come back.
        """
        _connect(config)
        cluster = None
        try:
            wait_s = max(config.cluster.wait_for_nodes_s, _FREE_LIMIT_S if is_restart else 0.0)
            cluster = cls(config, _checked_needs(config, wait_s))
            cluster._start_ranks()
        except BaseException:
            if cluster is not None:
                cluster.close()
            else:
                ray.shutdown()
            raise
        return cluster

    @property
    def failure(self) -> str:
        """Which learner rank has ended and why; empty while all of them live."""
        return self._ranks.failure if self._ranks is not None else ""

    @property
    def has_gpus(self) -> bool:
        """Whether the learner trains on GPUs."""
        return self._needs["learner ranks"].each.gpus > 0

    def with_dtype(self, config: Config) -> Config:
        """The config with the number type that ``model.dtype: auto`` means on the nodes of the learner."""
        if config.model.dtype != "auto":
            return config
        assert self._ranks is not None, "started"
        name: Any = self._ranks.auto_dtype(config.model.device) if self.has_gpus else "float32"
        return replace(config, model=replace(config.model, dtype=name))

    def build(self, spec: LearnerSpec) -> Learner:
        """Build the learner on all ranks."""
        from headwater.learner.build import LearnerSpec, build_learner

        assert self._ranks is not None, "started"
        # The ranks have other working directories.
        paths = [
            os.path.abspath(each) if looks_like_folder(each) else each
            for each in (spec.model_path, spec.reference_path)
        ]
        return self._ranks.build(build_learner, LearnerSpec(with_absolute_paths(spec.config), *paths))

    def log_to(self, folder: Path) -> None:
        """Write the output of every actor to a file in ``folder``, and events of the cluster to ``cluster.log``."""
        assert self._ranks is not None, "started"
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        events = folder / EVENTS
        if not events.exists():  # that of a run that is resumed is continued
            events.write_text(f"# {secrets.token_hex(8)}\n", encoding="utf-8")
        token = events.read_text(encoding="utf-8").splitlines()[0]
        self._events = events
        for text in self._told:
            self.tell(text)
        for slot in self._slots:
            slot.log_to(folder, token)
        for pool in self._pools:
            for number, where in enumerate(pool.log_to(folder, token)):
                self.tell(f"{pool.kind}-{number} logs to {where}")
        for rank, where in enumerate(self._ranks.log_to(folder, token)):
            self.tell(f"learner rank {rank} ({self._ranks.places[rank]}) logs to {where}")

    def tell(self, text: str) -> None:
        """Record an event."""
        if self._events is None:
            self._told.append(text)
            return
        with self._events.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def reserve(self, need: Need, count: int, name: str) -> Any:
        """A placement group with room for ``count`` actors. Waits while others use the resources."""
        group = placement_group(
            [need.each.bundle()] * count,
            strategy=need.strategy.upper(),
            name=name,
            bundle_label_selector=[dict(need.labels)] * count if need.labels else None,
        )
        limit_s = max(_FREE_LIMIT_S, self._config.cluster.wait_for_nodes_s)
        condition = threading.Condition()
        try:
            with condition:
                wait_until(
                    condition,
                    lambda: group.wait(_LOOK_S),
                    lambda: f"Ray finds room for {count} {need.what} ({need.key}), {need.each} each",
                    kind="ray",
                    hard_limit_s=limit_s,
                )
        except WaitTimeout as error:
            remove_placement_group(group)
            free = Room(ray.available_resources().get("CPU", 0.0), ray.available_resources().get("GPU", 0.0))
            raise HeadwaterError(
                f"{need.key} = {need.count}: {count} {need.what} need {need.each} each, and after {limit_s:.0f} s only "
                f"{free} of the cluster are free, because other jobs use the rest (`ray status` shows them); end "
                "those, lower this setting, or set cluster.wait_for_nodes_s to wait longer"
            ) from error
        except BaseException:
            remove_placement_group(group)
            raise
        self._groups.append(group)
        return group

    def places(self) -> tuple[ServerPlace, ...]:
        """Where the servers of the run are started, for ``BackendContext.places``. Empty if none are."""
        if not num_servers(self._config):
            return ()
        is_shared = shares_learner(self._config)
        on_gpu = self._needs["learner ranks" if is_shared else "rollout servers"].each.gpus > 0
        size = 1 if is_shared else self._config.rollout.launch.tensor_parallel
        devices = tuple(f"cuda:{index}" for index in range(size)) if on_gpu else ("cpu",) * size
        places = []
        for number in range(num_servers(self._config)):
            slot = self._slot(number)
            self._slots.append(slot)
            places.append(ServerPlace(slot.name, devices, is_shared, partial(RayChild.start, slot)))
        return tuple(places)

    def weight_transfer(self) -> WeightTransfer | None:
        """How weights reach servers on other machines, or come from several ranks; None if the config decides."""
        config = self._config
        told, folder = config.rollout.weight_transfer, config.rollout.weight_folder
        if not num_servers(config) or not (told == "auto" or (told == "file" and not folder)):
            return None
        if {node.name for node in _nodes()} == {ActorPlace.here().address}:
            # The other ways would gather all weights in one process and pass them on through Ray's object store.
            is_direct = not backend_traits(config).is_foreign
            return "collective" if told == "auto" and is_direct and config.cluster.learner.num_ranks > 1 else None
        usable = {"collective"} | ({"file"} if folder else set())
        known: tuple[WeightTransfer, ...] = get_args(WeightTransfer)
        transfers = [each for each in known if each in usable and each in supported_transfers(config)]
        if told == "file" or not transfers:
            read = "weights" if config.rollout.publish == "full" else "adapters (rollout.publish = adapter)"
            raise ConfigError(
                [
                    f"rollout.weight_transfer = {told}: the Ray cluster has several machines, and the servers of "
                    f"rollout.backend = {config.rollout.backend} on other machines read {read} from files; set "
                    "rollout.weight_folder to a folder that all nodes see"
                ]
            )
        if folder and backend_traits(config).is_foreign:
            return "file"
        return transfers[-1]  # collective if the servers have it

    def reward_pool(self) -> RayRewardPool | None:
        """The actors that score; None if scoring stays on this machine."""
        if not (settings := self._config.cluster.reward).num_actors:
            return None
        options, max_concurrent = self._placed("reward"), self._config.reward.max_concurrent
        pool = RayRewardPool.make(options, num_workers=settings.cpus_per_actor, max_concurrent=max_concurrent)
        self._pools.append(pool)
        return pool

    def tools(self) -> RayTools | None:
        """The actors that run tools; None if tools stay on this machine."""
        if not self._config.cluster.tools.num_actors:
            return None
        config = with_absolute_paths(self._config)
        pool = RayTools.start(self._placed("tools"), config.tools, config.sandbox, MediaSettings.of(config.data))
        self._pools.append(pool)
        return pool

    def _placed(self, kind: str) -> list[dict[str, Any]]:
        """Ray's options for the actors of one kind, with room for each."""
        need = self._needs[f"{kind.removesuffix('s')} actors"]
        group = self.reserve(need, need.count, f"{self._config.run.name} {kind}")
        return [
            {
                "name": f"{kind}-{number}",
                "num_cpus": need.each.cpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, number),
            }
            for number in range(need.count)
        ]

    def _slot(self, number: int) -> ServerSlot:
        config, name = self._config, f"rollout-{number}"
        groups: list[Any] = []

        def reserve() -> dict[str, Any]:
            cpus = {"num_cpus": config.cluster.rollout.cpus_per_server}
            if shares_learner(config):
                need, bundle = self._needs["learner ranks"], number % config.cluster.learner.num_ranks
                strategy = PlacementGroupSchedulingStrategy(self._learner_group, bundle)
                return {**cpus, "num_gpus": need.each.gpus * (1 - LEARNER_SHARE), "scheduling_strategy": strategy}
            need = self._needs["rollout servers"]
            groups.append(self.reserve(need, 1, f"{config.run.name} {name}"))
            strategy = PlacementGroupSchedulingStrategy(groups[-1], 0)
            return {**cpus, "num_gpus": need.each.gpus, "scheduling_strategy": strategy}

        def release() -> None:
            while groups:
                self.release(groups.pop())

        home = ActorPlace.here().address if config.rollout.weight_transfer == "shared_memory" else ""
        return ServerSlot(name, reserve, release, self.tell, only_at=home)

    def release(self, group: Any) -> None:
        self._groups.remove(group)
        with suppress(Exception):  # the cluster may be gone
            remove_placement_group(group)

    def close(self) -> None:
        """End all actors, give back their resources, and end a Ray that this run has started."""
        for pool in self._pools:
            pool.kill()
        if self._ranks is not None:
            self._ranks.close()
        for group in list(self._groups):
            self.release(group)
        ray.shutdown()

    def _start_ranks(self) -> None:
        need = self._needs["learner ranks"]
        self._learner_group = self.reserve(need, need.count, f"{self._config.run.name} learner")
        options = [
            {
                "name": f"learner-{rank}",
                "num_cpus": self._config.cluster.learner.cpus_per_rank,
                "num_gpus": need.each.gpus * (LEARNER_SHARE if shares_learner(self._config) else 1.0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._learner_group, rank),
            }
            for rank in range(need.count)
        ]
        self._ranks = RayRanks.start(options, timeout_s=self._config.learner.rank_timeout_s)


def _connect(config: Config) -> None:
    """Join the cluster of ``RAY_ADDRESS``, or start one on this machine."""
    address = os.environ.get("RAY_ADDRESS", "")
    namespace = f"headwater {config.run.name} {secrets.token_hex(4)}"
    common: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.WARNING}
    if address:
        try:
            ray.init(address, **common)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise HeadwaterError(
                f"RAY_ADDRESS = {address}: no Ray cluster answers there ({error}); check it with `ray status`, or "
                "unset it to start Ray on this machine"
            ) from error
        return
    store = config.cluster.object_store_mib * 2**20
    for num_left in reversed(range(_NUM_STARTS)):
        try:
            ray.init("local", include_dashboard=False, object_store_memory=store or None, **common)
            return
        except Exception as error:  # Ray raises plain ones, for example if a busy machine does not start it in 30 s
            ray.shutdown()
            if not num_left:
                raise HeadwaterError(f"cluster.kind = ray: Ray could not start on this machine: {error}") from error
            logger.warning("Ray did not start and is started again: %s", error)


def _checked_needs(config: Config, wait_s: float) -> list[Need]:
    """The actors of the run, once the cluster has nodes for them. ``ConfigError`` if it does not get them."""
    needs: list[Need] = []
    problems: list[str] = []

    def are_there() -> bool:
        nodes = _nodes()
        needs[:] = needs_of(config, has_gpus=any(node.room.gpus for node in nodes))
        problems[:] = shortages(needs, nodes) or without_gpus(config, needs)
        return not problems

    condition = threading.Condition()
    try:
        with condition:
            wait_until(condition, are_there, lambda: f"nodes: {problems[0]}", kind="ray", hard_limit_s=wait_s)
    except WaitTimeout as error:
        raise ConfigError(problems, "the Ray cluster") from error
    return needs


def _nodes() -> list[Node]:
    return [
        Node(
            each["NodeManagerAddress"],
            Room(each["Resources"].get("CPU", 0.0), each["Resources"].get("GPU", 0.0)),
            each.get("Labels", {}),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]
