"""Laws that hold for every DataProto, found wanting or not by hypothesis."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_data_proto_strategy import MAX_ROWS, QUICK, assert_same, data_protos, tensors

from headwater.core.data_proto import DataProto
from headwater.core.dispatch import collect, dispatch

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


def with_row_ids(data: DataProto) -> DataProto:
    return data.with_columns(tensors={"row": torch.arange(len(data))}, non_tensors={"row_object": range(len(data))})


def row_ids(data: DataProto) -> list[int]:
    """The row ids, after checking that tensors and objects moved together."""
    ids: list[int] = data.batch["row"].tolist()
    assert list(data.non_tensor_batch["row_object"]) == ids
    return ids


def snapshot(data: DataProto) -> DataProto:
    return data.select(deepcopy=True)


@QUICK
@given(data_protos(), st.integers(1, MAX_ROWS))
def test_concat_undoes_chunk(data: DataProto, num_chunks: int) -> None:
    if len(data) % num_chunks:
        with pytest.raises(ValueError, match="pad_to_divisor"):
            data.chunk(num_chunks)
        return
    parts = data.chunk(num_chunks)
    assert [len(part) for part in parts] == [len(data) // num_chunks] * num_chunks
    assert_same(DataProto.concat(parts), data)


@QUICK
@given(data_protos(), st.integers(1, MAX_ROWS + 2))
def test_concat_undoes_split(data: DataProto, size: int) -> None:
    parts = data.split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert len(parts) == max(1, -(-len(data) // size))
    assert_same(DataProto.concat(parts), data)


@QUICK
@given(data_protos(min_rows=1), st.integers(1, 3 * MAX_ROWS))
def test_unpad_undoes_padding_that_repeats_rows_cyclically(data: DataProto, divisor: int) -> None:
    padded, pad_size = with_row_ids(data).pad_to_divisor(divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert row_ids(padded) == [row % len(data) for row in range(len(data) + pad_size)]
    assert_same(padded.unpad(pad_size), with_row_ids(data))


@QUICK
@given(data_protos(), data_protos())
def test_union_of_disjoint_keys_commutes(left: DataProto, right: DataProto) -> None:
    num_rows = min(len(left), len(right))
    left, right = left[:num_rows], right[:num_rows]
    renamed = DataProto.from_dict(
        {f"right_{name}": tensor for name, tensor in right.batch.items()},
        {f"right_{name}": array for name, array in right.non_tensor_batch.items()},
        {f"right_{key}": value for key, value in right.meta_info.items()},
    )
    assert_same(left.union(renamed), renamed.union(left))
    assert len(left.union(renamed)) == num_rows


@QUICK
@given(data_protos())
def test_union_with_an_equal_batch_changes_nothing(data: DataProto) -> None:
    assert_same(data.union(snapshot(data)), data)


@QUICK
@given(data_protos(min_rows=1), st.data())
def test_union_names_the_column_that_differs(data: DataProto, draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from([*data.batch.keys(), *data.non_tensor_batch, *data.meta_info]))
    row = draw.draw(st.integers(0, len(data) - 1))
    other = snapshot(data)
    if name in data.meta_info:
        other.meta_info[name] = ["not", "the", "same"]
    elif name in data.non_tensor_batch:
        other.non_tensor_batch[name][row] = "not the same"
    elif other.batch[name].numel() == 0:
        return
    elif other.batch[name].dtype == torch.bool:
        other.batch[name][row] = ~other.batch[name][row]
    else:
        other.batch[name][row] = 12345
    with pytest.raises(ValueError, match=f"'{name}' has two different values"):
        data.union(other)


@QUICK
@given(data_protos(), st.data())
def test_reordering_by_a_permutation_and_its_inverse_is_the_identity(data: DataProto, draw: st.DataObject) -> None:
    order = draw.draw(st.permutations(range(len(data))))
    inverse = np.argsort(np.array(order, dtype=np.int64))
    reordered = with_row_ids(data).reorder(order)
    assert row_ids(reordered) == list(order)
    assert_same(reordered.reorder(inverse), with_row_ids(data))


@QUICK
@given(data_protos(), st.integers(1, 4), st.booleans())
def test_repeat(data: DataProto, times: int, interleave: bool) -> None:
    repeated = with_row_ids(data).repeat(times, interleave=interleave)
    rows = range(len(data))
    expected = (
        [row for row in rows for _ in range(times)] if interleave else [row for _ in range(times) for row in rows]
    )
    assert row_ids(repeated) == expected
    if not interleave:
        assert_same(repeated, DataProto.concat([with_row_ids(data)] * times))


@QUICK
@given(data_protos(), st.data())
def test_pop_leaves_what_it_does_not_take(data: DataProto, draw: st.DataObject) -> None:
    def some(keys: Any) -> list[str]:
        return draw.draw(st.lists(st.sampled_from(sorted(keys)), unique=True)) if keys else []

    chosen = (some(list(data.batch.keys())), some(data.non_tensor_batch), some(data.meta_info))
    before = snapshot(data)
    selected = data.select(*chosen)
    assert_same(data, before)
    popped = data.pop(*chosen)
    assert_same(popped, selected)
    data.check_consistency()
    assert set(popped.batch.keys()) == set(chosen[0])
    assert set(popped.non_tensor_batch) == set(chosen[1])
    assert set(popped.meta_info) == set(chosen[2])
    assert set(popped.batch.keys()) & set(data.batch.keys()) == set()
    assert len(data) == len(popped) == len(before)
    assert_same(data.union(popped), before)


@QUICK
@given(data_protos(), st.data())
def test_all_forms_of_an_index_agree(data: DataProto, draw: st.DataObject) -> None:
    data = with_row_ids(data)
    index = draw.draw(st.lists(st.integers(-len(data), len(data) - 1), max_size=5)) if len(data) else []
    expected = data[index]
    assert row_ids(expected) == [row % len(data) for row in index]
    assert_same(data[np.array(index, dtype=np.int32)], expected)
    assert_same(data[torch.tensor(index, dtype=torch.int64)], expected)
    for position, row in enumerate(index):
        item = data[row]
        one_row = DataProto.from_dict(
            {name: tensor[None] for name, tensor in item.tensors.items()},
            {name: [value] for name, value in item.non_tensors.items()},
            item.meta_info,
        )
        assert_same(one_row, expected[position : position + 1])


@QUICK
@given(data_protos(), st.data())
def test_all_forms_of_a_mask_agree(data: DataProto, draw: st.DataObject) -> None:
    data = with_row_ids(data)
    mask = draw.draw(st.lists(st.booleans(), min_size=len(data), max_size=len(data)))
    expected = data[[row for row, kept in enumerate(mask) if kept]]
    assert_same(data[np.array(mask, dtype=bool)], expected)
    assert_same(data[torch.tensor(mask, dtype=torch.bool)], expected)
    assert_same(data[mask], expected)


@QUICK
@given(data_protos(), st.slices(MAX_ROWS))
def test_a_slice_is_the_list_of_its_rows(data: DataProto, rows: slice) -> None:
    data = with_row_ids(data)
    expected = list(range(len(data)))[rows]
    assert row_ids(data[rows]) == expected
    assert_same(data[rows], data[expected])


@QUICK
@given(data_protos())
def test_iterating_gives_every_row(data: DataProto) -> None:
    items = list(with_row_ids(data))
    assert [item.non_tensors["row_object"] for item in items] == list(range(len(data)))


@QUICK
@given(data_protos())
def test_pickling_round_trip(data: DataProto) -> None:
    assert_same(pickle.loads(pickle.dumps(data)), data)


@QUICK
@given(
    data_protos(),
    st.integers(1, MAX_ROWS + 2),
    st.integers(1, 3),
    st.none() | st.integers(0, 2**70),
    st.booleans(),
)
def test_minibatches_visit_each_row_once_per_epoch(
    data: DataProto, size: int, epochs: int, seed: int | None, drop_last: bool
) -> None:
    data = with_row_ids(data)
    batches = list(data.minibatches(size, epochs, seed, drop_last))
    num_kept = len(data) - len(data) % size if drop_last else len(data)
    assert len(batches) == epochs * -(-num_kept // size)
    visited = [row for batch in batches for row in row_ids(batch)]
    for epoch in range(epochs):
        rows = visited[epoch * num_kept : (epoch + 1) * num_kept]
        assert len(set(rows)) == num_kept
        if seed is None:
            assert rows == list(range(num_kept))
    again = list(data.minibatches(size, epochs, seed, drop_last))
    assert [row_ids(batch) for batch in batches] == [row_ids(batch) for batch in again]
    assert not drop_last or all(len(batch) == size for batch in batches)
    for batch in batches:
        assert_same(batch, data[row_ids(batch)])


@QUICK
@given(data_protos())
def test_operations_leave_their_batch_as_it_was(data: DataProto) -> None:
    before = snapshot(data)
    names = [*data.batch.keys(), *data.non_tensor_batch]
    results = [
        data[:],
        data[::-1],
        data.select(),
        data.union(data),
        data.rename(names[0], "renamed"),
        data.repeat(2),
        data.reorder(range(len(data))[::-1]),
        data.unpad(0),
        data.to("cpu"),
        data.with_columns(meta_info={"added": 1}),
        DataProto.concat([data]),
        *data.split(2),
        *dispatch(data, [range(len(data)), []]),
        *data.minibatches(2, epochs=1, seed=0),
    ]
    for result in results:
        result.meta_info["written"] = 1
        result.non_tensor_batch["written"] = np.empty(len(result), dtype=object)
        result.batch["also_written"] = torch.zeros(len(result))
    assert_same(data, before)


@QUICK
@given(data_protos(max_rows=0))
def test_a_batch_of_0_rows_passes_through_every_operation(data: DataProto) -> None:
    names = [*data.batch.keys(), *data.non_tensor_batch]
    no_rows = np.empty(0, dtype=np.int64)
    for same in (
        data[:],
        data[::-1],
        data[[]],
        data[no_rows],
        data[no_rows.astype(bool)],
        data[torch.from_numpy(no_rows)],
        data.select(deepcopy=True),
        data.union(data),
        data.rename(names[0], "other").rename("other", names[0]),
        data.repeat(3),
        data.repeat(3, interleave=False),
        data.reorder([]),
        data.unpad(0),
        data.to("cpu"),
        DataProto.concat([data, data]),
        DataProto.concat(data.chunk(3)),
        DataProto.concat(data.split(3)),
        collect(dispatch(data, [[], [], []])),
        pickle.loads(pickle.dumps(data)),
    ):
        assert_same(same, data)
    assert len(dispatch(data, [[], [], []])) == 3
    assert list(data.minibatches(2, epochs=2, seed=0)) == []
    assert list(data) == []
    assert "0 rows" in repr(data)
    with pytest.raises(IndexError, match="0 rows"):
        data[0]
    with pytest.raises(ValueError, match="0 rows"):
        data.pad_to_divisor(2)
    assert len(data.pop(batch_keys=list(data.batch.keys()))) == 0


@QUICK
@given(st.integers(0, MAX_ROWS), st.data())
def test_equals_sees_every_kind_of_difference(num_rows: int, draw: st.DataObject) -> None:
    data = DataProto.from_dict({"x": draw.draw(tensors(num_rows))}, {"y": [[row] for row in range(num_rows)]}, {"z": 1})
    assert data.equals(snapshot(data))
    tensor = data.batch["x"]
    changed = [
        data.rename("x", "w"),
        data.rename("y", "w"),
        data.with_columns(meta_info={"z": 2}),
        data.with_columns(meta_info={"w": 2}),
        data.with_columns(meta_info={"z": True}),
        data.with_columns(tensors={"x": tensor.double()}),
        data.with_columns(tensors={"x": tensor[..., None]}),
        data.select(batch_keys=[]),
        DataProto.concat([data, data[:1]]) if num_rows else data.select(non_tensor_keys=[]),
    ]
    if num_rows:
        changed.append(data.with_columns(non_tensors={"y": [*data.non_tensor_batch["y"][:-1], (num_rows - 1,)]}))
    if tensor.numel():
        changed.append(data.with_columns(tensors={"x": torch.where(tensor == tensor.flatten()[0], 0, 1) + 1000}))
    for other in changed:
        assert not data.equals(other), repr(other)
        assert not other.equals(data), repr(other)
