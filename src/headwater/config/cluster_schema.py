"""The settings of a run on several machines: section ``cluster``. ``schema.py`` has all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from headwater.config.constraints import AtLeast, MoreThan

PlacementStrategy = Literal["pack", "spread", "strict_pack", "strict_spread"]


@dataclass(frozen=True)
class LearnerRanksConfig:
    num_ranks: Annotated[int, AtLeast(1)] = 1
    """Ranks that train together, each an actor. Each uses one GPU, unless the cluster has none or model.device is
    cpu."""
    cpus_per_rank: Annotated[float, MoreThan(0)] = 1.0
    """CPU cores that Ray reserves for each rank."""
    strategy: PlacementStrategy = "pack"
    """How ranks are placed: `pack` uses few nodes, `spread` many, `strict_pack` exactly one node, `strict_spread` one
    node per rank."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have to run a rank, for example {ray.io/accelerator-type: H100}."""


@dataclass(frozen=True)
class RolloutServersConfig:
    cpus_per_server: Annotated[float, MoreThan(0)] = 1.0
    """CPU cores that Ray reserves for each server."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have to run a disaggregated server; a value may be negated: {role: "!learner"}."""


@dataclass(frozen=True)
class RewardActorsConfig:
    num_actors: Annotated[int, AtLeast(0, "use 0 to score beside the training loop")] = 0
    """Actors that run scoring functions, each with its own worker processes; 0 scores on the machine of the training
    loop."""
    cpus_per_actor: Annotated[int, AtLeast(1)] = 1
    """CPU cores that Ray reserves for each actor, and scoring calls that it runs at the same time."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have to run an actor."""


@dataclass(frozen=True)
class ToolActorsConfig:
    num_actors: Annotated[int, AtLeast(0, "use 0 to run tools beside the training loop")] = 0
    """Actors that run the tools, each with its own copy of all of them; 0 runs them on the machine of the training
    loop. All calls of an episode go to the same actor."""
    cpus_per_actor: Annotated[float, MoreThan(0)] = 1.0
    """CPU cores that Ray reserves for each actor."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have to run an actor."""


@dataclass(frozen=True)
class ClusterConfig:
    kind: Literal["local", "ray"] = "local"
    """Where the learner and the servers run: `local` on this machine, or `ray` as actors of a Ray cluster, which the
    environment variable RAY_ADDRESS names or the run starts on this machine. The short form is cluster=ray."""
    learner: LearnerRanksConfig = field(default_factory=LearnerRanksConfig)
    rollout: RolloutServersConfig = field(default_factory=RolloutServersConfig)
    reward: RewardActorsConfig = field(default_factory=RewardActorsConfig)
    tools: ToolActorsConfig = field(default_factory=ToolActorsConfig)
    max_restarts: Annotated[int, AtLeast(0, "use 0 to end the run when a learner rank dies")] = 0
    """How often the run continues from its last checkpoint, with new ranks, after a learner rank has died."""
    wait_for_nodes_s: Annotated[float, AtLeast(0)] = 0.0
    """How long the run waits for nodes that have not joined yet, such as those of an autoscaler; 0 means that too few
    nodes are an error."""
    object_store_mib: Annotated[int, AtLeast(0, "use 0 for Ray's choice")] = 0
    """Size of the object store of a Ray that the run starts itself; 0 leaves the choice to Ray."""
