"""Which memory of a run stays on a GPU that an engine and a learner share, and what leaves it when.

    plan = make_plan(holders, budget)          # pure arithmetic
    plan.ways["optimizer"]                     # "streamed"
    print(plan.table())

A run has two phases that follow one another: the engine generates, then the learner trains. Every holder of memory has
one or more ways of living with both phases. The plan takes the ways that move the fewest bytes over the bus, and among
those the ones that change the least. A run that fits without moving anything moves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

GIB = 2**30

RESIDENT, RELEASED, MOVED, STREAMED = "resident", "released", "moved", "streamed"
"""How a holder lives: always on the device; released without a copy while it is not needed; moved to main memory while
it is not needed; or in main memory, passing through the device in every step."""

KV_CACHE = "kv_cache"


@dataclass(frozen=True)
class Way:
    """How a holder lives, and what that takes, in bytes."""

    name: str
    generate: int
    """On the device while the engine generates."""
    train: int
    """On the device while the learner trains."""
    moved: int = 0
    """Over the bus in every step, both directions together."""
    host: int = 0
    """Of main memory."""


@dataclass(frozen=True)
class Holder:
    """Something that takes memory of the device. Its ways are in the order of preference at equal cost."""

    tag: str
    ways: tuple[Way, ...]

    @property
    def largest(self) -> int:
        return max(max(way.generate, way.train) for way in self.ways)


@dataclass(frozen=True)
class Cache:
    """The KV cache, whose size the plan chooses."""

    needed: int
    """Bytes with which all responses of a step are generated at once. Plans are compared at this size."""
    smallest: int
    """Bytes below which the run cannot generate."""
    wanted: int
    """Bytes that the cache grows to if they are free."""
    ways: tuple[str, ...] = (RESIDENT, RELEASED)

    def holder(self, size: int) -> Holder:
        return Holder(KV_CACHE, tuple(Way(name, size, 0 if name == RELEASED else size) for name in self.ways))


@dataclass(frozen=True)
class Budget:
    """What there is, in bytes."""

    device: int
    host: int
    reserve: int = 0
    """Of the device's memory, left free: estimates are not exact, and memory is fragmented."""
    at_once: bool = False
    """Generation and training run at the same time, so that the device holds both."""


@dataclass(frozen=True)
class MemoryPlan:
    """The way of every holder."""

    holders: Mapping[str, Way]
    budget: Budget
    converts_at_once: bool = False
    """There is memory for a second copy of the trained weights, in the type that passes compute in."""

    @property
    def ways(self) -> dict[str, str]:
        return {tag: way.name for tag, way in self.holders.items()}

    @property
    def generate(self) -> int:
        """Bytes on the device while the engine generates."""
        return sum(way.generate for way in self.holders.values())

    @property
    def train(self) -> int:
        return sum(way.train for way in self.holders.values())

    @property
    def peak(self) -> int:
        if self.budget.at_once:
            return sum(max(way.generate, way.train) for way in self.holders.values())
        return max(self.generate, self.train)

    @property
    def moved(self) -> int:
        """Bytes over the bus in every step."""
        return sum(way.moved for way in self.holders.values())

    @property
    def host(self) -> int:
        return sum(way.host for way in self.holders.values())

    @property
    def kv_cache(self) -> int:
        return self.holders[KV_CACHE].generate if KV_CACHE in self.holders else 0

    @property
    def fits(self) -> bool:
        return self.peak + self.budget.reserve <= self.budget.device and self.host <= self.budget.host

    def table(self) -> str:
        """For people: every holder, how it lives, and its memory in both phases."""
        rows = [("", "way", "generate", "train", "moved per step")]
        for tag, way in self.holders.items():
            moved = _gib(way.moved) if way.moved else "-"
            rows.append((tag, way.name, _gib(way.generate), _gib(way.train), moved))
        rows.append(("all", "", _gib(self.generate), _gib(self.train), _gib(self.moved) if self.moved else "nothing"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(both)
            )
            for both in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        return "\n".join(line.rstrip() for line in lines)


class NoPlan(Exception):
    """Nothing fits. ``least`` is the plan that needs the least memory of the device."""

    def __init__(self, least: MemoryPlan) -> None:
        super().__init__(f"{_gib(least.peak)} are needed, {_gib(least.budget.device)} are there")
        self.least = least

    @property
    def missing(self) -> int:
        """Bytes of the device that are missing, without a reserve."""
        return max(0, self.least.peak - self.least.budget.device)


def make_plan(
    holders: Sequence[Holder],
    budget: Budget,
    cache: Cache | None = None,
    *,
    is_allowed: Callable[[MemoryPlan], bool] = lambda plan: True,
    is_tight: bool = False,
    spare: int = 0,
) -> MemoryPlan:
    """The plan that fits and moves the fewest bytes. Raises ``NoPlan``.

    Of several, it is the one that changes the least, or the one with the lowest peak if memory ``is_tight``.

    The cache gets the size it needs if any plan allows that; otherwise it is halved until one does. In the chosen plan
    it then grows to the wanted size, as far as memory is free, but leaves ``spare`` bytes. ``is_allowed`` excludes
    plans whose ways do not go together.
    """
    for size in _sizes(cache):
        every = [*holders, cache.holder(size)] if cache is not None else list(holders)
        plans = [plan for plan in _all_plans(every, budget, is_allowed) if plan.fits]
        if plans:
            best = min(plans, key=(lambda plan: (plan.moved, plan.peak)) if is_tight else _cost)
            return best if cache is None else grown(best, cache, spare)
    smallest = [*holders, cache.holder(cache.smallest)] if cache is not None else list(holders)
    tight = replace(budget, reserve=0)
    raise NoPlan(
        min(_all_plans(smallest, tight, is_allowed), key=lambda plan: (plan.host > budget.host, plan.peak, _cost(plan)))
    )


def _sizes(cache: Cache | None) -> list[int]:
    """The sizes to try, largest first."""
    if cache is None:
        return [0]
    sizes = [max(cache.needed, cache.smallest)]
    while sizes[-1] // 2 > cache.smallest:
        sizes.append(sizes[-1] // 2)
    return [*sizes, cache.smallest] if sizes[-1] > cache.smallest else sizes


def _all_plans(holders: Sequence[Holder], budget: Budget, is_allowed: Callable[[MemoryPlan], bool]) -> list[MemoryPlan]:
    tags = [holder.tag for holder in holders]
    every = itertools.product(*(holder.ways for holder in holders))
    plans = (MemoryPlan(dict(zip(tags, ways, strict=True)), budget) for ways in every)
    return [plan for plan in plans if is_allowed(plan)]


def _cost(plan: MemoryPlan) -> tuple[int, int, int]:
    """Bytes over the bus first, then the number of holders that are not simply there, then the peak."""
    return plan.moved, sum(way.name != RESIDENT for way in plan.holders.values()), plan.peak


def grown(plan: MemoryPlan, cache: Cache, spare: int = 0) -> MemoryPlan:
    """The same ways with the largest cache that fits and leaves ``spare`` bytes, at most the wanted one.

    Where memory has to be released, a cache larger than needed would only make that harder.
    """
    way, budget = plan.holders[KV_CACHE], plan.budget
    is_always = budget.at_once or way.train > 0
    used = plan.peak if is_always else plan.generate
    is_roomy = all(each.name == RESIDENT for each in plan.holders.values())
    most = cache.wanted if is_roomy else min(cache.wanted, cache.needed + cache.needed // 4)
    size = max(way.generate, min(most, way.generate + budget.device - budget.reserve - spare - used))
    grown = replace(way, generate=size, train=size if way.train else 0)
    return replace(plan, holders={**plan.holders, KV_CACHE: grown})


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
