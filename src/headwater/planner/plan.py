"""Compares ways to divide GPUs between the learner and the inference servers, by simulating each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from headwater.config.traits import BackendTraits
from headwater.core.errors import HeadwaterError
from headwater.planner.costs import Costs
from headwater.planner.hardware import (
    GIB,
    GPUS_PER_MACHINE,
    RANKS_EFFICIENCY,
    Gpu,
    ModelShape,
    Training,
    gpus_per_server,
    roofline_costs,
)
from headwater.planner.simulate import Prediction, simulate
from headwater.planner.workload import Workload

CONTROLLER_EVENTS_PER_S = 14_000
"""What one core handles in front of 512 servers, with the router and 8,192 episodes in flight: controller_load.json."""
RECEIVE_TOKEN_S = 0.3e-6
"""What receiving a token from a server takes in the same thread: cpu_served_rounds.json, 2.5 ms for 8,192 tokens."""
RECORD_TOKEN_S = 0.18e-6
"""What making and checking the record of an episode takes in the same thread, per token: batch_assembly.json."""
WRITE_TOKEN_S = 0.17e-6
"""What the rollout file takes in the thread that writes records, per token: batch_assembly.json."""
DEFAULT_STALENESS = (0, 1, 2, 4, 8)
TOLERANCE = 0.02
"""Rates that differ by less count as equal. docs/planner.md says how much the random lengths change the ratio of two
splits."""
_MAX_SPLITS = 8
_EPISODES_PER_SIMULATION = 40_000
_FEWEST_STEPS = 3


@dataclass(frozen=True)
class Split:
    """Which GPUs train and which generate."""

    num_learner_gpus: int
    num_servers: int
    num_server_gpus: int = 1
    """GPUs of one server."""
    is_colocated: bool = False
    """All GPUs train and generate in turn: one learner rank and one server on each."""

    @property
    def num_gpus(self) -> int:
        return self.num_learner_gpus + (0 if self.is_colocated else self.num_servers * self.num_server_gpus)

    @property
    def is_in_process(self) -> bool:
        """On one GPU the learner's process can generate itself. On several, each rank has a server beside it."""
        return self.is_colocated and self.num_learner_gpus == 1

    def __str__(self) -> str:
        if self.is_colocated:
            return f"all {self.num_learner_gpus} colocated"
        return f"{self.num_learner_gpus} : {self.num_servers * self.num_server_gpus}"


def transfer_of(split: Split, traits: BackendTraits, weight_transfer: str) -> str:
    """How weights reach the servers of a split; empty if the engine is in the learner's process."""
    if split.is_in_process and not traits.is_foreign:
        return ""
    if weight_transfer != "auto":
        return weight_transfer
    is_direct = split.num_learner_gpus > 1 and not traits.is_foreign
    if split.num_gpus <= GPUS_PER_MACHINE and not is_direct:
        return traits.transfers[0]
    return "collective" if "collective" in traits.transfers else "file"


class CostModel(Protocol):
    """What every split costs."""

    @property
    def num_server_gpus(self) -> int:
        """GPUs that one server needs."""
        ...

    def costs(self, split: Split) -> Costs: ...
    def problem(self, split: Split) -> str:
        """Why a split is impossible; empty if it is not."""
        ...


@dataclass(frozen=True)
class Roofline:
    """Costs from the shape of the model and the rates of the GPU."""

    shape: ModelShape
    gpu: Gpu
    training: Training
    context: float
    """The mean number of tokens that a token attends to."""
    max_sequences: int = 0
    traits: BackendTraits = field(default_factory=BackendTraits)
    """Of the backend."""
    weight_transfer: str = "auto"
    """As ``rollout.weight_transfer``; ``auto`` chooses as a run does."""

    @property
    def num_server_gpus(self) -> int:
        return gpus_per_server(self.shape, self.gpu)

    def transfer(self, split: Split) -> str:
        return transfer_of(split, self.traits, self.weight_transfer)

    def costs(self, split: Split) -> Costs:
        return roofline_costs(
            self.shape,
            self.gpu,
            self.training,
            num_learner_gpus=split.num_learner_gpus,
            num_server_gpus=split.num_server_gpus,
            context=self.context,
            is_foreign=self.traits.is_foreign,
            max_sequences=self.max_sequences,
            weight_transfer=self.transfer(split),
        )

    def problem(self, split: Split) -> str:
        needed = self.training.learner_bytes(self.shape, split.num_learner_gpus)
        if split.is_colocated:
            if split.num_server_gpus > 1:
                return f"a server beside a learner rank has one GPU, and the model needs {split.num_server_gpus}"
            needed += 2.0 * self.shape.num_parameters
        if needed <= self.gpu.memory_bytes:
            return ""
        return f"needs {needed / GIB:,.0f} GiB per learner GPU, which has {self.gpu.memory_bytes / GIB:.0f}"


@dataclass(frozen=True)
class Measured:
    """Costs that were measured with one learner device and one server of one device."""

    measured: Costs
    num_server_gpus: int = 1

    def costs(self, split: Split) -> Costs:
        learner, count = self.measured.learner, split.num_learner_gpus
        if count == 1:
            return self.measured
        speed = count * RANKS_EFFICIENCY
        faster = replace(
            learner,
            train_per_token_s=learner.train_per_token_s / speed,
            experience_per_token_s=learner.experience_per_token_s / speed,
        )
        note = f"several learner ranks are assumed to reach {RANKS_EFFICIENCY:.0%} of their number; not measured"
        return replace(self.measured, learner=faster, notes=(*self.measured.notes, note))

    def problem(self, split: Split) -> str:
        return ""


@dataclass(frozen=True)
class Candidate:
    """One split at one staleness."""

    split: Split
    max_staleness: int
    prediction: Prediction | None
    problem: str = ""
    """Why there is no prediction."""
    is_shortened: bool = False
    """Steps are so large that fewer were simulated than a run needs to reach its steady state."""

    @property
    def rate(self) -> float:
        return self.prediction.tokens_per_s if self.prediction is not None else 0.0

    @property
    def controller_load(self) -> float:
        """The share of the time in which the controller's event loop is busy, on one core."""
        if self.prediction is None:
            return 0.0
        tokens_s = (RECEIVE_TOKEN_S + RECORD_TOKEN_S) * self.prediction.total_tokens_per_s
        return self.prediction.events_per_s / CONTROLLER_EVENTS_PER_S + tokens_s

    def to_json(self) -> dict[str, Any]:
        prediction = asdict(self.prediction) if self.prediction is not None else None
        return {"split": asdict(self.split), "max_staleness": self.max_staleness, "problem": self.problem,
                "is_shortened": self.is_shortened, "prediction": prediction}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    by_split: tuple[Candidate, ...]
    """All splits, colocated first, at the same staleness (a colocated step is synchronous), then those with fewer GPUs
    that are as fast."""
    by_staleness: tuple[Candidate, ...]
    """The best split of all GPUs at several values of ``rollout.max_staleness``."""
    whole: Candidate
    """The best split of all GPUs: of those that are as fast as any, the one with the fewest learner GPUs."""
    best: Candidate
    """The best of ``by_split``: of those that are as fast as any, the one with the fewest GPUs."""
    notes: tuple[str, ...]
    source: str

    @property
    def older(self) -> Candidate | None:
        """The smallest staleness that is a tenth faster than the best split and nearly as fast as any other."""
        fastest = max((each.rate for each in self.by_staleness), default=0.0)
        enough = (each for each in self.by_staleness if each.rate > max(0.9 * fastest, 1.1 * self.best.rate))
        return next(enough, None)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "notes": list(self.notes),
            "best": self.best.to_json(),
            "by_split": [each.to_json() for each in self.by_split],
            "by_staleness": [each.to_json() for each in self.by_staleness],
        }


def make_plan(
    workload: Workload,
    model: CostModel,
    num_gpus: int,
    *,
    staleness: Sequence[int] = DEFAULT_STALENESS,
    progress: Callable[[Split, int], object] = lambda split, staleness: None,
) -> Plan:
    """Simulate splits at the recipe's staleness (1 if that is 0), then the best split at all of ``staleness``."""
    at = workload.max_staleness or 1
    seen: dict[tuple[Split, int], Candidate] = {}

    def row(split: Split, max_staleness: int | None = None) -> Candidate:
        if max_staleness is None:
            max_staleness = 0 if split.is_colocated else at
        key = split, max_staleness
        if key not in seen:
            progress(split, max_staleness)
            seen[key] = predict(workload, model, split, max_staleness)
        return seen[key]

    by_split = [row(each) for each in splits(num_gpus, model.num_server_gpus)]
    possible = [each for each in by_split if each.prediction is not None]
    if not possible:
        problems = "; ".join(f"{each.split}: {each.problem}" for each in by_split[:3])
        raise HeadwaterError(
            f"--gpus {num_gpus}: the model does not fit in any split ({problems}); give more GPUs, set "
            "learner.checkpoint_activations=true, lower learner.max_tokens_per_microbatch, or use lora.rank"
        )
    separate = [each for each in possible if not each.split.is_colocated]
    by_staleness: list[Candidate] = []
    if separate:
        best_split = _best(separate).split
        by_staleness = [row(best_split, each) for each in sorted({*staleness, at})]
    whole = _best(possible)
    by_split += _with_fewer_gpus(possible, row)
    best = _best(by_split)
    costs = model.costs(best.split)
    notes = costs.notes
    if any(each.is_shortened for each in (*by_split, *by_staleness)):
        notes += ("the steps are large, so few were simulated, and the rows may not show the steady state",)
    return Plan(tuple(by_split), tuple(by_staleness), whole, best, notes, costs.source)


def _least(rows: Sequence[Candidate]) -> float:
    """The rate from which on a row counts as equal to the fastest."""
    return (1 - TOLERANCE) * max(each.rate for each in rows)


def _best(rows: Sequence[Candidate]) -> Candidate:
    least = _least(rows)
    equal = (each for each in rows if each.rate >= least)
    return min(equal, key=lambda each: (each.split.num_gpus, each.split.num_learner_gpus, -each.rate))


def _with_fewer_gpus(rows: Sequence[Candidate], simulated: Callable[[Split], Candidate]) -> list[Candidate]:
    """Splits with fewer GPUs that are as fast as the fastest of ``rows``, which use all of them."""
    found: list[Candidate] = []
    least, fewest = _least(rows), rows[0].split.num_gpus
    separate = [each.split for each in rows if each.rate >= least and not each.split.is_colocated]
    if separate:
        # A split is as fast as its slower side, and each of these two numbers was enough for its side.
        both = replace(
            separate[0],
            num_learner_gpus=min(each.num_learner_gpus for each in separate),
            num_servers=min(each.num_servers for each in separate),
        )
        if both.num_gpus < fewest and (row := simulated(both)).rate >= least:
            found.append(row)
            fewest = both.num_gpus
    each_server, num_gpus = rows[0].split.num_server_gpus, rows[0].split.num_gpus
    while num_servers := (num_gpus := num_gpus // 2) // each_server:
        split = Split(num_servers * each_server, num_servers, each_server, is_colocated=True)
        if split.num_gpus < fewest:
            row = simulated(split)
            if row.rate < least:
                break
            found.append(row)
    return found


def splits(num_gpus: int, num_server_gpus: int) -> list[Split]:
    """Colocated, and at most eight ways to divide the GPUs."""
    found = []
    if num_gpus >= num_server_gpus:
        found.append(Split(num_gpus, num_gpus // num_server_gpus, num_server_gpus, is_colocated=True))
    most = (num_gpus - 1) // num_server_gpus
    counts = sorted({max(1, round(most * share / _MAX_SPLITS)) for share in range(1, _MAX_SPLITS + 1)})
    found += [
        Split(num_gpus - count * num_server_gpus, count, num_server_gpus) for count in reversed(counts) if count <= most
    ]
    return found


def predict(
    workload: Workload,
    model: CostModel,
    split: Split,
    max_staleness: int,
    *,
    max_episodes: int | None = None,
) -> Candidate:
    """Simulate one split at one staleness, with fewer steps if they have more than ``max_episodes`` together.

    None means as many as a plan of several splits can afford.
    """
    problem = model.problem(split)
    if problem:
        return Candidate(split, max_staleness, None, problem)
    at = replace(workload, max_staleness=max_staleness)
    ahead = min(max_staleness, 8)
    most = max(_FEWEST_STEPS + 2, (max_episodes or _EPISODES_PER_SIMULATION) // workload.num_episodes)
    warm_up = min(2 + ahead, most - _FEWEST_STEPS)
    num_steps = min(4 + 2 * ahead, most - warm_up)
    try:
        predicted = simulate(at, model.costs(split), split.num_servers, num_steps=num_steps, warm_up=warm_up)
    except HeadwaterError as error:
        return Candidate(split, max_staleness, None, str(error))
    return Candidate(split, max_staleness, predicted, is_shortened=warm_up < 2 + ahead)
