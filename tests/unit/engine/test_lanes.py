"""Taking in what rows drew."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.records import ModelRequest, SamplingParams
from headwater.engine.lanes import Lanes
from headwater.engine.sequence import Sequence

PAGES = np.array([1], np.int32)
START = np.array([5])


def lanes_of(capacity: int, max_new_tokens: int = 16) -> Lanes:
    lanes = Lanes(capacity, max_pages=4)
    for row in range(capacity):
        request = ModelRequest(str(row), (5,), SamplingParams(max_new_tokens), row)
        lanes.take(Sequence(request, (), row, on_end=lambda _: None), row, START, PAGES, 0)
    return lanes


def test_rows_without_a_sequence_cost_no_lane_its_tokens():
    """Such rows are lane -1 in a plan, which is also how numpy spells the last lane."""
    lanes = lanes_of(2)
    plan = np.array([1, -1])
    tokens = np.array([[7, -1], [8, -1]], np.int32)
    lanes.append(plan, tokens, np.zeros((2, 2), np.float32), tokens >= 0, version=3)
    lanes.collect(1)
    sequence = lanes.sequence[1]
    assert (sequence.tokens, sequence.versions) == ([7, 8], [3, 3])


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-1, 3), min_size=6, max_size=6), min_size=1, max_size=5), st.data())
def test_every_lane_gets_its_own_tokens_in_order(rounds, data):
    lanes, expected, drawn = lanes_of(4), {lane: [] for lane in range(4)}, 0
    for rows in rounds:
        seen = set()
        plan = np.array([-1 if lane in seen or seen.add(lane) else lane for lane in rows])
        tokens = np.full((3, len(plan)), -1, np.int32)
        for column, lane in enumerate(plan.tolist()):
            for step in range(data.draw(st.integers(0, 3)) if lane >= 0 else 0):
                drawn += 1
                tokens[step, column] = drawn
                expected[lane].append(drawn)
        lanes.append(plan, tokens, tokens.astype(np.float32), tokens >= 0, version=drawn)
    for lane, all_of_them in expected.items():
        lanes.collect(lane)
        assert lanes.sequence[lane].tokens == all_of_them
        assert lanes.sequence[lane].logprobs == all_of_them
