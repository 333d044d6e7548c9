"""Splitting a batch over ranks and putting it back together."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_data_proto_strategy import MAX_ROWS, QUICK, assert_same, data_protos

from headwater.core.data_proto import DataProto
from headwater.core.dispatch import collect, dispatch


def numbered(num_rows: int) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(num_rows)}, {"uid": [f"row{row}" for row in range(num_rows)]}, {"temperature": 0.5}
    )


def in_order(data: DataProto, num_ranks: int) -> list[DataProto]:
    """Consecutive rows, in parts that may be empty."""
    cuts = [rank * len(data) // num_ranks for rank in range(num_ranks + 1)]
    return dispatch(data, [range(start, end) for start, end in pairwise(cuts)])


@QUICK
@given(data_protos(), st.integers(1, 2 * MAX_ROWS), st.randoms(use_true_random=False))
def test_collect_undoes_dispatch(data: DataProto, num_ranks: int, random) -> None:
    parts = in_order(data, num_ranks)
    assert sum(len(part) for part in parts) == len(data)
    assert_same(collect(parts), data)
    assert_same(collect([pickle.loads(pickle.dumps(part)) for part in parts]), data)
    assigned: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in range(len(data)):
        assigned[random.randrange(num_ranks)].append(row)
    assert_same(collect(dispatch(data, assigned)), data)


@QUICK
@given(data_protos(), st.integers(1, 4), st.integers(1, 4))
def test_dispatch_nests(data: DataProto, num_nodes: int, num_ranks: int) -> None:
    nodes = [collect(in_order(node, num_ranks)) for node in in_order(data, num_nodes)]
    assert_same(collect(nodes), data)


def test_ranks_may_add_columns_reorder_and_repeat_rows() -> None:
    parts = dispatch(numbered(5), [[4, 0], [], [1, 2, 3]])
    assert [part.batch["x"].tolist() for part in parts] == [[4, 0], [], [1, 2, 3]]
    outputs = [part.repeat(2).with_columns(tensors={"double": 2 * part.repeat(2).batch["x"]}) for part in parts]
    collected = collect(outputs)
    assert collected.batch["double"].tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert collected.meta_info == {"temperature": 0.5}
    assert set(collected.batch.keys()) == {"x", "double"}


def test_parts_that_do_not_belong_together_are_refused() -> None:
    parts = in_order(numbered(4), 3)
    for wrong in (parts[:2], [parts[0], parts[0], parts[2]]):
        with pytest.raises(ValueError, match="pass one part of every rank"):
            collect(wrong)
    for wrong, message in (
        ([], "no parts"),
        ([in_order(numbered(3), 2)[0], in_order(numbered(4), 2)[1]], "part 1 is from another dispatch"),
        ([DataProto.from_dict({"y": parts[0].batch["x"]})], r"part 0 has no meta_info.*DataProto\.concat"),
        ([parts[0], parts[1][:0], parts[2]], "no rank returned row 1"),
    ):
        with pytest.raises(ValueError, match=message):
            collect(wrong)


def test_rows_that_are_assigned_twice_or_not_at_all_are_refused() -> None:
    for wrong in ([[0, 1], [1]], [[0]], [[0, 1, 2]]):
        with pytest.raises(ValueError, match="do not name each of the 2 rows once"):
            dispatch(numbered(2), wrong)


def test_meta_info_that_ranks_disagree_on_is_named() -> None:
    outputs = [part.with_columns(meta_info={"seconds": rank}) for rank, part in enumerate(in_order(numbered(4), 2))]
    with pytest.raises(ValueError, match="meta_info 'seconds' has two different values, 0 and 1"):
        collect(outputs)
