"""What a run needs of a cluster, and whether the cluster can ever give it.

    needs = [Need("learner ranks", "cluster.learner.num_ranks", 2, Room(cpus=1))]
    if problems := shortages(needs, [Node("10.0.0.1", Room(cpus=8, gpus=1), {})]):
        raise ConfigError(problems)

A shortage is reported only if no placement exists. Resources that other jobs use are not looked at here: the run waits
for those.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from headwater.config.cluster_schema import PlacementStrategy
from headwater.config.schema import Config


@dataclass(frozen=True)
class Room:
    """An amount of resources."""

    cpus: float = 0.0
    gpus: float = 0.0

    def __add__(self, other: Room) -> Room:
        return Room(self.cpus + other.cpus, self.gpus + other.gpus)

    def __mul__(self, count: int) -> Room:
        return Room(self.cpus * count, self.gpus * count)

    def holds(self, other: Room) -> bool:
        return self.cpus >= other.cpus and self.gpus >= other.gpus

    def __str__(self) -> str:
        cpus = f"{self.cpus:g} CPU{'s' if self.cpus != 1 else ''}"
        return f"{cpus} and {self.gpus:g} GPU{'s' if self.gpus != 1 else ''}" if self.gpus else cpus

    def bundle(self) -> dict[str, float]:
        """As Ray writes it."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


@dataclass(frozen=True)
class Node:
    name: str
    room: Room
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Need:
    """Several actors of one kind."""

    what: str
    """For example ``learner ranks``."""
    key: str
    """The setting that decides how many there are."""
    count: int
    each: Room
    labels: Mapping[str, str] = field(default_factory=dict)
    labels_key: str = ""
    strategy: PlacementStrategy = "pack"

    def fits(self, node: Node) -> bool:
        return all(_matches(node.labels.get(name), wanted) for name, wanted in self.labels.items())


def _matches(value: str | None, wanted: str) -> bool:
    """``wanted`` is written as Ray does: ``a``, ``!a``, ``in(a, b)`` or ``!in(a, b)``."""
    if wanted.startswith("!"):
        return not _matches(value, wanted[1:])
    if wanted.startswith("in(") and wanted.endswith(")"):
        return value in [each.strip() for each in wanted[3:-1].split(",")]
    return value == wanted


def needs_of(config: Config, *, has_gpus: bool) -> list[Need]:
    """The actors of a run. ``has_gpus`` tells whether any node has a GPU."""
    cluster, launch = config.cluster, config.rollout.launch
    uses_gpus = config.model.device != "cpu" and (has_gpus or config.model.device.startswith("cuda"))
    server = Room(cluster.rollout.cpus_per_server)
    rank = Room(cluster.learner.cpus_per_rank, gpus=float(uses_gpus))
    if shares_learner(config):
        rank += server  # the server runs in the bundle of its rank, on the same GPU
    learner = cluster.learner
    needs = [
        Need(
            "learner ranks",
            "cluster.learner.num_ranks",
            learner.num_ranks,
            rank,
            learner.labels,
            "cluster.learner.labels",
            learner.strategy,
        )
    ]
    servers = num_servers(config)
    if servers and not shares_learner(config):
        on_gpu = config.rollout.device != "cpu" and uses_gpus
        needs.append(
            Need(
                "rollout servers",
                "rollout.launch.num_servers",
                servers,
                server + Room(gpus=float(on_gpu) * launch.tensor_parallel),
                cluster.rollout.labels,
                "cluster.rollout.labels",
            )
        )
    if reward := cluster.reward.num_actors:
        each = Room(cluster.reward.cpus_per_actor)
        needs.append(
            Need(
                "reward actors",
                "cluster.reward.num_actors",
                reward,
                each,
                cluster.reward.labels,
                "cluster.reward.labels",
            )
        )
    if tools := cluster.tools.num_actors:
        each = Room(cluster.tools.cpus_per_actor)
        labels = cluster.tools.labels
        needs.append(Need("tool actors", "cluster.tools.num_actors", tools, each, labels, "cluster.tools.labels"))
    return needs


def shares_learner(config: Config) -> bool:
    """Whether servers run beside the learner's ranks, on their GPUs."""
    return config.rollout.placement == "colocated" and not config.rollout.servers


def num_servers(config: Config) -> int:
    """Servers that the run starts in the cluster."""
    if config.rollout.servers:
        return 0
    launch = config.rollout.launch
    return launch.num_servers or (config.cluster.learner.num_ranks if shares_learner(config) else launch.count)


def shortages(needs: Sequence[Need], nodes: Sequence[Node]) -> list[str]:
    """What the nodes can never hold, each with the key to change."""
    problems = [text for need in needs if (text := _shortage(need, nodes))]
    total = _sum(need.each * need.count for need in needs)
    if not problems and len(needs) > 1 and not _sum(node.room for node in nodes).holds(total):
        parts = ", ".join(f"{need.each * need.count} for {need.count} {need.what} ({need.key})" for need in needs)
        problems.append(
            f"{needs[0].key} = {needs[0].count}: the run needs {total} in total: {parts}; {_has(nodes)}; lower one of "
            "these settings, or add nodes"
        )
    return problems


def without_gpus(config: Config, needs: Sequence[Need]) -> list[str]:
    """Why ``rollout.weight_link = nccl`` does not work with these actors. Ray gives each of the others its own GPU."""
    if config.rollout.weight_link != "nccl":
        return []
    without = [need.what for need in needs if need.what in ("learner ranks", "rollout servers") and not need.each.gpus]
    if not without:
        return []
    return [
        f"rollout.weight_link = nccl: NCCL sends from GPU to GPU, and the {' and '.join(without)} of this cluster have "
        "no GPUs; use rollout.weight_link=gloo, or add nodes with GPUs"
    ]


def _shortage(need: Need, nodes: Sequence[Node]) -> str:
    able = [node for node in nodes if need.fits(node)]
    wanted = f"{need.key} = {need.count}: {need.count} {need.what} need {need.each} each"
    if not able and need.labels:
        labels = ", ".join(f"{name}={value}" for name, value in need.labels.items())
        return f"{need.labels_key}: no node has the labels {labels} that {need.what} need; {_has(nodes, labels=True)}"
    roomy = [node for node in able if node.room.holds(need.each)]
    where = " with these labels" if need.labels else ""
    if not roomy:
        return f"{wanted}, and no node{where} has that; {_has(able)}; lower it, or add larger nodes"
    if need.strategy == "strict_pack" and not any(node.room.holds(need.each * need.count) for node in able):
        return f"{wanted} on one node (strategy strict_pack), and no node{where} has that; {_has(able)}; use pack"
    if need.strategy == "strict_spread" and len(roomy) < need.count:
        return (
            f"{wanted} on a separate node (strategy strict_spread), and only {len(roomy)} nodes have that; use spread"
        )
    if not _sum(node.room for node in able).holds(need.each * need.count):
        return f"{wanted}, {need.each * need.count} in total; {_has(able)}{where}; lower it, or add nodes"
    return ""


def _has(nodes: Sequence[Node], *, labels: bool = False) -> str:
    def describe(node: Node) -> str:
        told = ", ".join(f"{name}={value}" for name, value in node.labels.items() if not name.startswith("ray.io/node"))
        return f"{node.name} with {node.room}" + (f" and labels {told or 'none'}" if labels else "")

    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    listed = "; ".join(describe(node) for node in nodes[:4]) + (" and others" if len(nodes) > 4 else "")
    return f"the cluster has {count}" + (f" ({listed})" if nodes else "")


def _sum(rooms: Iterable[Room]) -> Room:
    return reduce(operator.add, rooms, Room())
