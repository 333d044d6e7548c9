"""Storing the output of rows."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from engine.engine_parts import LIMIT_S, bits, like_a_gpu, request, running, stepped, tokens_of, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.requests import ModelRequest, SamplingParams
from headwater.engine.lanes import _PILE, Lanes
from headwater.engine.sequence import EngineSequence

PAGES = np.array([1], np.int32)
START = np.array([5], np.int32)
PILE = 2
"""Tokens after which ``collect_early`` collects a lane, in the test that patches it."""


def lanes_of(capacity: int, max_new_tokens: int = 16) -> Lanes:
    lanes = Lanes(capacity, max_pages=4)
    for row in range(capacity):
        request = ModelRequest(str(row), (5,), SamplingParams(max_new_tokens), row)
        lanes.take([EngineSequence(request, (), row, on_end=lambda _: None)], [row], START, PAGES[None], 0)
    return lanes


def test_rows_without_a_sequence_cost_no_lane_its_tokens():
    """Such rows have lane -1 in a plan, which numpy would interpret as the last lane."""
    lanes = lanes_of(2)
    plan = np.array([1, -1])
    tokens = np.array([[7, -1], [8, -1]], np.int32)
    lanes.append(plan, tokens, np.zeros((2, 2), np.float32), tokens >= 0, version=3)
    lanes.collect(1)
    sequence = lanes.sequence[1]
    assert (sequence.tokens, sequence.versions) == ([7, 8], [3, 3])


def test_a_large_budget_costs_the_others_neither_their_tokens_nor_memory():
    lanes = lanes_of(3)
    lanes.give_back(2)
    tokens = np.array([[7, 8]], np.int32)
    lanes.append(np.array([0, 1]), tokens, np.zeros((1, 2), np.float32), tokens >= 0, version=3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    budget = 200_000_000
    request = ModelRequest("long", (5,), SamplingParams(budget), 0)
    [lane] = lanes.take([EngineSequence(request, (), 9, on_end=lambda _: None)], [2], START, PAGES[None], 0)
    lanes.append(np.array([lane]), np.array([[9]], np.int32), np.zeros((1, 1), np.float32), np.array([[True]]), 3)
    lanes.collect_all(np.arange(3))
    assert [lanes.sequence[each].tokens for each in range(3)] == [[7], [8], [9]]
    # In KiB. Fully allocated arrays would need 12 bytes per token in each of 3 lanes. Other threads may need some too.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-1, 3), min_size=6, max_size=6), min_size=1, max_size=5), st.data())
def test_every_lane_gets_its_own_tokens_in_order(rounds, data):
    lanes, expected, versions, drawn = lanes_of(4), {lane: [] for lane in range(4)}, {}, 0
    for rows in rounds:
        seen = set()
        plan = np.array([-1 if lane in seen or seen.add(lane) else lane for lane in rows])
        tokens = np.full((3, len(plan)), -1, np.int32)
        for column, lane in enumerate(plan.tolist()):
            for step in range(data.draw(st.integers(0, 3)) if lane >= 0 else 0):
                drawn += 1
                tokens[step, column] = drawn
                expected[lane].append(drawn)
        versions |= dict.fromkeys(tokens[tokens >= 0].tolist(), drawn)
        lanes.append(plan, tokens, tokens.astype(np.float32), tokens >= 0, version=drawn)
        if data.draw(st.booleans()):
            num_before = [len(lanes.sequence[lane].tokens) for lane in expected]
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("headwater.engine.lanes._PILE", PILE)
                lanes.collect_early()
            for (lane, so_far), before in zip(expected.items(), num_before, strict=True):
                has_piled_up = len(so_far) - before >= PILE
                assert lanes.sequence[lane].tokens == (so_far if has_piled_up else so_far[:before])
    together = np.array(data.draw(st.lists(st.sampled_from(range(4)), unique=True)), np.int64)
    lanes.collect_all(together)
    for lane, all_of_them in expected.items():
        assert lanes.token_bytes(lane) == np.array([5, *all_of_them], np.int32).tobytes()
        if lane not in together:
            lanes.collect(lane)
        assert lanes.sequence[lane].tokens == all_of_them
        assert lanes.sequence[lane].logprobs == all_of_them
        assert lanes.sequence[lane].versions == [versions[token] for token in all_of_them]


def test_what_has_not_piled_up_is_left():
    lanes = lanes_of(2, max_new_tokens=2 * _PILE)
    tokens = np.full((_PILE, 2), -1, np.int32)
    tokens[:, 0], tokens[1:, 1] = 7, 8
    lanes.append(np.arange(2), tokens, np.zeros(tokens.shape, np.float32), tokens >= 0, version=1)
    lanes.collect_early()
    assert [len(sequence.tokens) for sequence in lanes.sequence] == [_PILE, 0]
    lanes.collect_early()
    assert len(lanes.sequence[0].tokens) == _PILE


def test_many_lanes_are_given_back_as_they_are_one_by_one():
    one_by_one, at_once = lanes_of(5), lanes_of(5)
    for lane in (3, 0, 4):
        one_by_one.give_back(lane)
    at_once.give_back_all(np.array([3, 0, 4]))
    assert at_once._free == one_by_one._free
    for name in ("row", "tenancy"):
        assert getattr(at_once, name).tolist() == getattr(one_by_one, name).tolist()
    assert [each is None for each in at_once.sequence] == [each is None for each in one_by_one.sequence]


LONG = [request(tokens_of(length), length, max_new_tokens=40 + length) for length in (3, 20)]
EARLY = 16
"""Tokens after which output is collected early in the tests below."""


@pytest.fixture(scope="module")
def collected_at_the_end():
    with pytest.MonkeyPatch.context() as patched, running(deterministic=True) as engine:
        patched.setattr("headwater.engine.lanes._PILE", 10**9)
        return bits(like_a_gpu(engine).generate(LONG))


def test_long_responses_are_the_same_however_early_they_are_collected(collected_at_the_end, monkeypatch):
    num_early = []
    collect_early = Lanes.collect_early

    def counted(lanes):
        before = lanes._num_collected.sum()
        collect_early(lanes)
        num_early.append(lanes._num_collected.sum() - before)

    monkeypatch.setattr("headwater.engine.lanes._PILE", EARLY)
    monkeypatch.setattr(Lanes, "collect_early", counted)
    with running(deterministic=True) as engine:
        assert bits(like_a_gpu(engine).generate(LONG)) == collected_at_the_end
    assert sum(num_early) >= 2 * 2 * EARLY


def test_an_interruption_in_the_middle_of_long_responses_loses_nothing(collected_at_the_end, monkeypatch):
    monkeypatch.setattr("headwater.engine.lanes._PILE", EARLY)
    with stepped(deterministic=True, gpu_like=True) as slow:
        answers = [slow.submit(each) for each in LONG]
        slow.turn(4)
        slow.engine.update_weights(weights(0, 1), "interrupt")
        slow.finish()
        responses = [answer.result(LIMIT_S) for answer in answers]
    assert slow.engine.metrics().num_interrupted == len(LONG)
    assert bits(responses) == collected_at_the_end
    assert all(set(response.output_versions) == {0, 1} for response in responses)
    assert all(response.output_versions.count(0) > EARLY for response in responses)


def test_the_last_pages_of_all_lanes_come_first():
    lanes = Lanes(3, 4)
    lanes.page_table[0, :3], lanes.page_table[1, :1], lanes.page_table[2, :4] = [1, 2, 3], [4], [1, 2, 5, 6]
    lanes.num_pages[:] = 3, 1, 4
    assert lanes.last_pages_first(np.array([0, 1, 2])).tolist() == [6, 3, 5, 2, 2, 1, 4, 1]
    assert lanes.last_pages_first(np.zeros(0, np.int64)).tolist() == []
