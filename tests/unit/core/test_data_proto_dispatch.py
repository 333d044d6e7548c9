"""A batch over ranks and back."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_data_proto_strategy import MAX_ROWS, QUICK, assert_same, data_protos

from headwater.core.data_proto import DataProto


def numbered(num_rows: int) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(num_rows)}, {"uid": [f"row{row}" for row in range(num_rows)]}, {"temperature": 0.5}
    )


@QUICK
@given(data_protos(), st.integers(1, 2 * MAX_ROWS))
def test_collect_undoes_dispatch(data: DataProto, num_ranks: int) -> None:
    parts = data.dispatch(num_ranks)
    assert [len(part) for part in parts] == [-(-len(data) // num_ranks)] * num_ranks
    assert_same(DataProto.collect(parts), data)
    assert_same(DataProto.collect([pickle.loads(pickle.dumps(part)) for part in parts]), data)


@QUICK
@given(data_protos(), st.integers(1, 4), st.integers(1, 4))
def test_dispatch_nests(data: DataProto, num_nodes: int, num_ranks: int) -> None:
    nodes = [DataProto.collect(node.dispatch(num_ranks)) for node in data.dispatch(num_nodes)]
    assert_same(DataProto.collect(nodes), data)


def test_what_ranks_add_comes_back_row_by_row() -> None:
    data = numbered(5)
    outputs = [part.with_columns(tensors={"double": 2 * part.batch["x"]}) for part in data.dispatch(3)]
    collected = DataProto.collect(outputs)
    assert collected.batch["double"].tolist() == [0, 2, 4, 6, 8]
    assert collected.meta_info == {"temperature": 0.5}


def test_parts_are_padded_with_the_first_rows() -> None:
    parts = numbered(5).dispatch(3)
    assert [part.batch["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 0]]
    parts = numbered(2).dispatch(5)
    assert [part.batch["x"].tolist() for part in parts] == [[0], [1], [0], [1], [0]]


def test_ranks_that_build_new_batches_need_the_row_count() -> None:
    outputs = [DataProto.from_dict({"y": part.batch["x"]}) for part in numbered(5).dispatch(3)]
    with pytest.raises(ValueError, match=r"part 0 has no meta_info.*pass num_rows"):
        DataProto.collect(outputs)
    assert DataProto.collect(outputs, num_rows=5).batch["y"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="num_rows = 7: the parts hold 6 rows"):
        DataProto.collect(outputs, num_rows=7)


def test_ranks_that_return_several_rows_per_row_need_the_row_count() -> None:
    outputs = [part.repeat(2) for part in numbered(3).dispatch(2)]
    with pytest.raises(ValueError, match="part 0 has 4 rows but was given 2"):
        DataProto.collect(outputs)
    collected = DataProto.collect(outputs, num_rows=6)
    assert collected.batch["x"].tolist() == [0, 0, 1, 1, 2, 2]
    assert collected.meta_info == {"temperature": 0.5}


def test_missing_repeated_or_shuffled_parts_are_refused() -> None:
    parts = numbered(4).dispatch(3)
    for wrong in (parts[:2], parts[::-1], [parts[0], parts[0], parts[2]]):
        with pytest.raises(ValueError, match="of every rank, in rank order"):
            DataProto.collect(wrong)
    with pytest.raises(ValueError, match="no parts"):
        DataProto.collect([])


def test_parts_of_two_dispatches_are_refused() -> None:
    with pytest.raises(ValueError, match="part 1 is from another dispatch"):
        DataProto.collect([numbered(3).dispatch(2)[0], numbered(4).dispatch(2)[1]])


def test_meta_info_that_ranks_disagree_on_is_named() -> None:
    outputs = [part.with_columns(meta_info={"seconds": rank}) for rank, part in enumerate(numbered(4).dispatch(2))]
    with pytest.raises(ValueError, match="meta_info 'seconds' has two different values, 0 and 1"):
        DataProto.collect(outputs)


def test_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="num_ranks = 0: must be >= 1"):
        numbered(2).dispatch(0)
