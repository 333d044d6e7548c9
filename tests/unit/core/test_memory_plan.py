"""A memory plan fits, moves as little as possible, and says by how much nothing fits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.memory_plan import (
    KV_CACHE,
    MOVED,
    RELEASED,
    RESIDENT,
    STREAMED,
    Budget,
    Cache,
    Holder,
    MemoryPlan,
    NoPlan,
    Way,
    make_plan,
)


def learner(weights: int, parameters: int, optimizer: int, gradients: int) -> list[Holder]:
    return [
        Holder("weights", (Way(RESIDENT, weights, weights), Way(RELEASED, weights, 0))),
        Holder(
            "parameters",
            (
                Way(RESIDENT, parameters, parameters),
                Way(MOVED, 0, parameters, moved=2 * parameters, host=parameters),
            ),
        ),
        Holder(
            "optimizer",
            (Way(RESIDENT, optimizer, optimizer), Way(STREAMED, 0, 1, moved=2 * optimizer, host=optimizer)),
        ),
        Holder("gradients", (Way(RESIDENT, 0, gradients),)),
    ]


SEVEN = learner(weights=15, parameters=30, optimizer=60, gradients=30)
CACHE = Cache(needed=10, smallest=1, wanted=40)


@pytest.mark.parametrize(
    ("device", "expected", "kv_cache", "moved"),
    [
        (300, {}, 40, 0),  # everything fits, and the cache grows as far as it can be used
        (160, {}, 25, 0),  # the cache takes what training leaves
        (140, {"weights": RELEASED}, 12, 0),
        (125, {KV_CACHE: RELEASED, "weights": RELEASED}, 12, 0),
        (90, {"optimizer": STREAMED}, 12, 120),
        (76, {"optimizer": STREAMED, "weights": RELEASED}, 12, 120),
        (61, {"optimizer": STREAMED, KV_CACHE: RELEASED, "weights": RELEASED}, 12, 120),
    ],
)
def test_the_less_memory_there_is_the_more_leaves(device, expected, kv_cache, moved):
    plan = make_plan(SEVEN, Budget(device, host=1000), CACHE)
    assert {tag: way for tag, way in plan.ways.items() if way != RESIDENT} == expected
    assert plan.kv_cache == kv_cache
    assert plan.moved == moved


def test_nothing_leaves_while_both_work_except_averages():
    plan = make_plan(
        [holder if holder.tag == "optimizer" else Holder(holder.tag, holder.ways[:1]) for holder in SEVEN],
        Budget(110, host=1000, at_once=True),
        Cache(needed=10, smallest=1, wanted=40, ways=(RESIDENT,)),
    )
    assert {tag for tag, way in plan.ways.items() if way != RESIDENT} == {"optimizer"}
    assert plan.peak <= 110


def test_a_plan_that_cannot_fit_says_how_much_is_missing():
    with pytest.raises(NoPlan) as error:
        make_plan(SEVEN, Budget(50, host=1000), CACHE)
    assert error.value.least.peak == 61  # parameters, gradients and a bucket of averages
    assert error.value.missing == 11
    with pytest.raises(NoPlan) as error:
        make_plan(SEVEN, Budget(100, host=20), CACHE)
    assert error.value.least.host <= 20


def test_the_table_shows_every_holder_and_what_is_moved():
    plan = make_plan(SEVEN, Budget(90 * 2**30, host=2**40), CACHE)
    lines = plan.table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*plan.holders, "all"]
    assert lines[-1].endswith("nothing")
    assert "moved per step" in lines[0]


SIZES = st.integers(0, 50)


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.integers(0, 250), st.integers(0, 120), st.integers(0, 8), st.booleans(), SIZES)
def test_a_plan_fits_and_no_other_moves_less(
    weights, parameters, optimizer, gradients, device, host, reserve, at_once, needed
):
    holders = learner(weights, parameters, optimizer, gradients)
    budget = Budget(device, host, reserve, at_once)
    cache = Cache(needed=max(1, needed), smallest=1, wanted=2 * max(1, needed))
    try:
        plan = make_plan(holders, budget, cache)
    except NoPlan as error:
        least = error.least
        smallest = [*holders, cache.holder(cache.smallest)]
        assert not any(each.fits for each in every_plan(smallest, budget))
        assert least.peak <= min(each.peak for each in every_plan(smallest, budget) if each.host <= host)
        return
    assert plan.fits
    assert cache.smallest <= plan.kv_cache <= cache.wanted
    same_cache = [*holders, cache.holder(min(plan.kv_cache, cache.needed))]
    assert plan.moved == min(each.moved for each in every_plan(same_cache, budget) if each.fits)
    if all(way == RESIDENT for way in plan.ways.values()):
        assert plan.moved == 0


def every_plan(holders: list[Holder], budget: Budget) -> list[MemoryPlan]:
    tags = [holder.tag for holder in holders]
    combinations = itertools.product(*(holder.ways for holder in holders))
    return [MemoryPlan(dict(zip(tags, ways, strict=True)), budget) for ways in combinations]
