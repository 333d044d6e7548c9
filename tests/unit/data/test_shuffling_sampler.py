from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import DataError
from headwater.data.sampler import DataPart, Draw, MixingSampler, ShufflingSampler

quick = settings(deadline=None, max_examples=40)
sizes, seeds = st.integers(1, 30), st.integers(0, 2**40)


@quick
@given(sizes, seeds, st.booleans(), st.integers(0, 100), st.integers(0, 100))
def test_resumed_equals_uninterrupted(num_rows, seed, shuffle, before, after):
    whole = ShufflingSampler(num_rows, seed, shuffle).take(before + after)
    first = ShufflingSampler(num_rows, seed, shuffle)
    head = first.take(before)
    second = ShufflingSampler(num_rows, seed, shuffle)
    second.take(3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + second.take(after) == whole
    assert first.take(after) == whole[before:]


@quick
@given(sizes, seeds, st.lists(st.integers(0, 40), max_size=8))
def test_chunk_sizes_do_not_matter(num_rows, seed, counts):
    chunked, whole = ShufflingSampler(num_rows, seed), ShufflingSampler(num_rows, seed)
    assert [draw for count in counts for draw in chunked.take(count)] == whole.take(sum(counts))
    assert chunked.state_dict() == whole.state_dict()


@quick
@given(sizes, seeds, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5))
def test_looking_ahead_does_not_move_the_position(num_rows, seed, counts):
    parts = [DataPart("a", 0, num_rows, weight=2), DataPart("b", num_rows, num_rows + 5, weight=1)]
    samplers = [ShufflingSampler(num_rows, seed), MixingSampler(parts, seed)]
    for sampler in samplers:
        for ahead, taken in counts:
            before = sampler.state_dict()
            seen = sampler.peek(ahead)
            assert sampler.state_dict() == before
            draws = sampler.take(max(ahead, taken))
            assert draws[:ahead] == seen


@quick
@given(sizes, seeds, st.booleans())
def test_every_epoch_visits_every_row_once(num_rows, seed, shuffle):
    draws = ShufflingSampler(num_rows, seed, shuffle).take(3 * num_rows)
    for epoch in range(3):
        part = draws[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(draw.index for draw in part) == list(range(num_rows))
        assert {draw.epoch for draw in part} == {epoch}


def test_epochs_and_seeds_differ():
    draws = ShufflingSampler(50, 0).take(100)
    first, second = ([draw.index for draw in part] for part in (draws[:50], draws[50:]))
    assert first != second
    assert first != [draw.index for draw in ShufflingSampler(50, 1).take(50)]
    assert first != list(range(50))


def test_file_order_without_shuffling():
    assert ShufflingSampler(2, 0, shuffle=False).take(3) == [Draw(0, 0), Draw(1, 0), Draw(0, 1)]


def test_the_order_is_pinned():
    """A numpy that shuffled otherwise would break the resume of every earlier run."""
    drawn = [draw.index for draw in ShufflingSampler(10, 7).take(20)]
    assert drawn == [4, 5, 9, 8, 1, 7, 6, 0, 2, 3, 8, 6, 9, 5, 0, 7, 3, 4, 1, 2]


def test_state_is_tiny_for_any_dataset():
    sampler = ShufflingSampler(1_000_000, 3)
    sampler.take(10)
    expected = {"seed": 3, "num_rows": 1_000_000, "shuffle": True, "epoch": 0, "position": 10}
    assert sampler.state_dict() == expected


OTHER_STATES = [
    (
        {"num_rows": 9},
        "num_rows = 9 in the checkpoint, 10 now; the rows of data.train, their filter or the tokenizer changed",
    ),
    ({"seed": 4}, "seed = 4 in the checkpoint, 0 now; set run.seed"),
    ({"shuffle": False}, "shuffle = False in the checkpoint, True now"),
    ({"position": 10}, "position = 10 with 10 rows; the checkpoint is damaged"),
    ({"epoch": -1}, "epoch = -1"),
]


def test_state_of_another_dataset():
    sampler = ShufflingSampler(10, 0)
    before = sampler.state_dict()
    for change, message in OTHER_STATES:
        with pytest.raises(DataError, match=message):
            sampler.load_state_dict({**before, **change})
        assert sampler.state_dict() == before, change


def test_incomplete_state():
    with pytest.raises(DataError, match="sampler state: shuffle, epoch, position missing"):
        ShufflingSampler(10, 0).load_state_dict({"seed": 0, "num_rows": 10})


def test_bad_arguments():
    with pytest.raises(DataError, match="num_rows = 0"):
        ShufflingSampler(0, 0)
    with pytest.raises(DataError, match="seed = -1"):
        ShufflingSampler(1, -1)
    with pytest.raises(ValueError, match="count = -1"):
        ShufflingSampler(1, 0).take(-1)
