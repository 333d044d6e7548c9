"""Picking and arranging the rows of a DataProto, by example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_data_proto_strategy import example, uids

from headwater.core.data_proto import DataProto, DataProtoItem


def test_an_integer_gives_one_row() -> None:
    data = example()
    for index in (1, -3, np.int64(1), torch.tensor(1), np.array(1)):
        item = data[index]
        assert isinstance(item, DataProtoItem)
        assert item.tensors["ids"].tolist() == [2, 3]
        assert item.non_tensors == {"uid": "b", "turns": [1, 2]}
        assert item.meta_info == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), "bc"),
        (slice(None, None, -2), "db"),
        (slice(5, 9), ""),
        ([3, 0, 0, -1], "daad"),
        ([], ""),
        (range(2), "ab"),
        (np.array([1, -1], dtype=np.int8), "bd"),
        (np.array([1, 2], dtype=np.uint64), "bc"),
        (np.array([True, False, False, True]), "ad"),
        (torch.tensor([2, 1]), "cb"),
        (torch.tensor([False, True, False, False]), "b"),
    ],
)
def test_any_other_index_gives_a_batch(index: Any, expected: str) -> None:
    picked = example()[index]
    assert uids(picked) == expected
    assert picked.batch["reward"].tolist() == ["abcd".index(uid) for uid in expected]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexError, "row 4 is out of range for a batch of 4 rows"),
        (-5, IndexError, "row -5 is out of range for a batch of 4 rows"),
        ([0, 4], IndexError, "row 4 is out of range"),
        (np.array([-5]), IndexError, "row -5 is out of range"),
        (torch.tensor([7]), IndexError, "row 7 is out of range"),
        (np.array([2**63], dtype=np.uint64), IndexError, "row 9223372036854775808 is out of range"),
        (np.array([True]), IndexError, "mask of 1 booleans does not fit a batch of 4"),
        (torch.zeros(5, dtype=torch.bool), IndexError, "mask of 5 booleans does not fit a batch of 4"),
        (np.zeros((2, 2), dtype=int), IndexError, "2 dimensions"),
        ([0.5], TypeError, "dtype float64; use integers or booleans"),
        (torch.tensor([1.0]), TypeError, "dtype float32"),
        (torch.tensor(1.0), TypeError, "is not a row number"),
        (True, TypeError, "True is not a row number"),
        (np.bool_(True), TypeError, "is not a row number"),
        (torch.tensor(True), TypeError, "is not a row number"),
        ("uid", TypeError, r"read a column with data.batch\['uid'\]"),
        ((0, 1), TypeError, "not indexed by tuple; use"),
        (None, TypeError, "not indexed by NoneType; use"),
    ],
)
def test_a_wrong_index_is_explained(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        example()[index]


def test_repeat() -> None:
    data = example()[:2]
    assert uids(data.repeat(2)) == "aabb"
    assert uids(data.repeat(2, interleave=False)) == "abab"


def test_reorder_counts_negative_rows_from_the_end() -> None:
    assert uids(example().reorder([-1, 0, -2, 1])) == "dacb"


def test_chunk_and_split() -> None:
    assert [uids(part) for part in example().chunk(2)] == ["ab", "cd"]
    assert [uids(part) for part in example().split(3)] == ["abc", "d"]


def test_padding_repeats_rows_from_the_first_on() -> None:
    padded, pad_size = example()[:2].pad_to_divisor(7)
    assert (uids(padded), pad_size) == ("abababa", 5)
    assert uids(padded.unpad(5)) == "ab"
    assert len(padded.unpad(7)) == 0
    padded, pad_size = example().pad_to_divisor(2)
    assert (uids(padded), pad_size) == ("abcd", 0)


def test_the_order_of_a_seed_is_fixed() -> None:
    """Written out, so that a change of generator cannot go unnoticed: it would alter every resumed run."""
    data = DataProto.from_dict({"row": torch.arange(8)})
    batches = [batch.batch["row"].tolist() for batch in data.minibatches(size=3, epochs=2, seed=7)]
    assert batches == [[7, 4, 6], [1, 5, 0], [2, 3], [7, 4, 3], [0, 1, 5], [2, 6]]
    other = [batch.batch["row"].tolist() for batch in data.minibatches(size=3, epochs=2, seed=8)]
    assert other != batches


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: data.repeat(0), "times = 0: must be >= 1"),
        (lambda data: data.chunk(0), "num_chunks = 0: must be >= 1"),
        (lambda data: data.chunk(3), r"num_chunks = 3: does not divide 4 rows; call pad_to_divisor\(3\)"),
        (lambda data: data.split(0), "size = 0: must be >= 1"),
        (lambda data: data.reorder([0, 1, 2]), "3 indices do not name each of 4 rows once; use data"),
        (lambda data: data.reorder([0, 1, 2, 2]), "4 indices do not name each of 4 rows once; use data"),
        (lambda data: data.pad_to_divisor(0), "divisor = 0: must be >= 1"),
        (lambda data: data[:0].pad_to_divisor(2), r"pad_to_divisor\(2\): 0 rows leave nothing to pad with"),
        (lambda data: data.unpad(5), r"pad_size = 5: must be in 0..4"),
        (lambda data: data.unpad(-1), r"pad_size = -1: must be in 0..4"),
        (lambda data: data.minibatches(0, epochs=1), "size = 0: must be >= 1"),
        (lambda data: data.minibatches(1, epochs=0), "epochs = 0: must be >= 1"),
        (lambda data: data.minibatches(1, epochs=1, seed=-1), "seed = -1: must be >= 0; use None"),
    ],
)
def test_a_wrong_number_is_explained_at_the_call(call: Callable[[DataProto], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(example())


def test_concat_merges_meta_info() -> None:
    joined = DataProto.concat([example(), example().select(meta_keys=[]).with_columns(meta_info={"step": 1})])
    assert uids(joined) == "abcdabcd"
    assert joined.meta_info == {"temperature": 1.0, "step": 1}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda data: data.rename("ids", "x"), r"part 1 lacks columns \['ids'\] and adds \['x'\]"),
        (lambda data: data.select(non_tensor_keys=["uid"]), r"part 1 lacks columns \['turns'\] and adds \[\]"),
        (lambda data: data.with_columns({"ids": torch.zeros(4, 3)}), r"'ids' is float32 \(3,\) .* and int64 \(2,\)"),
        (lambda data: data.with_columns({"reward": torch.zeros(4).double()}), "'reward' is float64 .* and float32"),
        (lambda data: data.with_columns({"reward": torch.zeros(4, device="meta")}), "'reward' is .* on meta .* on cpu"),
        (
            lambda data: data.select(batch_keys=["ids"]).with_columns(non_tensors={"reward": [1, 2, 3, 4]}),
            "'reward' is objects in part 1 and float32",
        ),
        (
            lambda data: data.with_columns(meta_info={"temperature": 0.0}),
            "meta_info 'temperature' .* 1.0 and 0.0; make",
        ),
    ],
)
def test_a_concat_that_cannot_be_is_explained(other: Callable[[DataProto], DataProto], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto.concat([example(), other(example())])


def test_concat_needs_a_part() -> None:
    with pytest.raises(ValueError, match="concat got no parts"):
        DataProto.concat([])
