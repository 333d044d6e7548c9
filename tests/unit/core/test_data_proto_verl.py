"""The operations and argument names that code written for verl expects of a DataProto."""

from __future__ import annotations

import dataclasses
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_data_proto_strategy import MAX_ROWS, QUICK, assert_same, data_protos, example, uids

from headwater.core.columns import values_equal
from headwater.core.data_proto import DataProto
from headwater.core.errors import WaitTimeout
from headwater.core.verl_functions import (
    DataProtoFuture,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)


def test_arguments_have_the_names_of_verl_too() -> None:
    data: Any = example()
    keys = {"batch_keys": ["ids"], "non_tensor_batch_keys": ["uid"], "meta_info_keys": []}
    assert_same(data.select(**keys), data.select(["ids"], ["uid"], []))
    assert_same(data.repeat(repeat_times=2), data.repeat(2))
    assert len(data.chunk(chunks=2)) == len(data.split(split_size=2)) == 2
    proto: Any = DataProto
    assert_same(proto.concat(data=data.chunk(2)), data)
    assert_same(proto.from_single_dict(data={"ids": data.batch["ids"]}), data.select(["ids"], [], []))
    renamed = data.rename(old_keys=["ids", "uid"], new_keys=["uid", "ids"])
    assert "ids" in renamed.non_tensor_batch
    assert sorted(renamed.batch.keys()) == ["reward", "uid"]
    assert sorted(data.pop(**keys).batch.keys()) == ["ids"]
    with pytest.raises(TypeError, match="times and repeat_times, which are the same"):
        data.repeat(times=2, repeat_times=2)
    with pytest.raises(ValueError, match="one new name for each"):
        data.rename(["reward"], ["a", "b"])
    with pytest.raises(ValueError, match="'turns' already exists"):
        data.rename("reward", "turns")


@QUICK
@given(data_protos(min_rows=1), st.data())
def test_rows_are_selected_and_repeated(data: DataProto, draw: st.DataObject) -> None:
    counts = draw.draw(st.lists(st.integers(0, 3), min_size=len(data), max_size=len(data)))
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    for times in (counts, torch.tensor(counts), np.array(counts)):
        assert_same(data.sample_level_repeat(times), data.select_idxs(rows))
    start, stop = sorted(draw.draw(st.tuples(st.integers(0, MAX_ROWS), st.integers(0, MAX_ROWS))))
    assert_same(data.slice(start, stop), data[start:stop])
    assert_same(data.slice(end=stop, step=2), data[:stop:2])
    assert_same(data.padding(2, "last"), DataProto.concat([data, data[-1:], data[-1:]]))
    assert_same(data.padding(1), DataProto.concat([data, data[:1]]))
    padded, pad_size = pad_dataproto_to_divisor(data, 3)
    assert len(padded) % 3 == 0
    assert_same(unpad_dataproto(padded, pad_size), data)


def test_what_cannot_be_repeated_or_padded_is_explained() -> None:
    for counts in ([1, 2], [1.5] * 4, [-1, 1, 1, 1]):
        with pytest.raises(ValueError, match="repeat_times"):
            example().sample_level_repeat(counts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'first' or 'last'"):
        example().padding(1, "middle")
    with pytest.raises(ValueError, match="0 for a batch of 0 rows"):
        example()[:0].padding(1)


@QUICK
@given(data_protos(min_rows=1))
def test_a_tensordict_keeps_everything(data: DataProto) -> None:
    assert_same(DataProto.from_tensordict(data.to_tensordict()), data)


def test_a_tensordict_that_cannot_be_is_explained() -> None:
    replaced = DataProto.from_tensordict(example().to_tensordict(), meta_info={"temperature": 2.0})
    assert replaced.meta_info == {"temperature": 2.0}
    with pytest.raises(ValueError, match="'uid' must be a string that no column is called"):
        example().with_columns(meta_info={"uid": 1}).to_tensordict()
    with pytest.raises(ValueError, match="'uid' has 0 rows"):
        example()[:0].to_tensordict()
    with pytest.raises(ValueError, match="one dimension"):
        DataProto.from_tensordict(example().to_tensordict().reshape(2, 2))


@QUICK
@given(data_protos(), st.integers(1, MAX_ROWS))
def test_unfolding_undoes_folding(data: DataProto, size: int) -> None:
    if len(data) % size:
        with pytest.raises(ValueError, match="does not divide"):
            fold_batch_dim(data, size)
        return
    folded = fold_batch_dim(data, size)
    assert len(folded) == size
    assert_same(unfold_batch_dim(folded), data)


def test_columns_are_split_into_rows() -> None:
    data = example().with_columns(
        tensors={"wide": torch.arange(24).reshape(4, 2, 3)}, non_tensors={"two": [[1, 2]] * 4}
    )
    unfolded = data.unfold_column_chunks(2, ["ids", "two"])
    assert unfolded.batch["ids"].tolist() == [[i] for i in range(8)]
    assert list(unfolded.non_tensor_batch["two"]) == [[1], [2]] * 4
    assert uids(unfolded) == "aabbccdd"
    assert unfolded.batch["wide"].shape == (8, 2, 3)
    assert data.unfold_column_chunks(2).batch["wide"].shape == (8, 1, 3)
    for keys, message in ((["reward"], "'reward'"), (["turns"], "'turns', row 0"), (["nothing"], "nothing")):
        with pytest.raises((ValueError, KeyError), match=message):
            data.unfold_column_chunks(2, keys)


def test_make_iterator_requires_equal_batches() -> None:
    data = example()
    assert [uids(part) for part in data.make_iterator(2, epochs=2, seed=1)] == ["ab", "cd"] * 2
    shuffled = [uids(part) for part in data.make_iterator(2, 1, 1, {"shuffle": True})]
    assert shuffled == [uids(part) for part in data.minibatches(2, 1, 1)]
    assert [uids(part) for part in data.make_iterator(3, dataloader_kwargs={"drop_last": True})] == ["abc"]
    for options, message in ((None, "does not divide"), ({"shuffle": True}, "needs a seed"), ({"x": 1}, "no 'x'")):
        with pytest.raises(ValueError, match=message):
            data.make_iterator(3, dataloader_kwargs=options)


@QUICK
@given(data_protos(), st.integers(1, MAX_ROWS))
def test_with_auto_padding_chunks_may_be_unequal(data: DataProto, num_chunks: int) -> None:
    assert not data.is_padding_enabled()
    padded = DataProto.from_dict(dict(data.batch.items()), data.non_tensor_batch, data.meta_info, auto_padding=True)
    assert padded.is_padding_enabled()
    parts = padded.chunk(num_chunks)
    assert len(parts) == num_chunks
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert_same(DataProto.concat(parts), padded)


@QUICK
@given(data_protos(), data_protos())
def test_the_other_batch_overrides(left: DataProto, right: DataProto) -> None:
    num_rows = min(len(left), len(right))
    left, right = left[:num_rows], right[:num_rows]
    both = left.union_or_override(right)
    tensors, objects, meta = list(right.batch.keys()), list(right.non_tensor_batch), list(right.meta_info)
    assert_same(both.select(tensors, objects, meta), right)
    columns = {*left.batch.keys(), *left.non_tensor_batch, *right.batch.keys(), *right.non_tensor_batch}
    assert {*both.batch.keys(), *both.non_tensor_batch} == columns


def test_concat_merges_metrics() -> None:
    data = example().select(meta_keys=[])
    parts = [data.with_columns(meta_info={"metrics": {"loss": loss, "grad": [loss, loss]}}) for loss in (1.0, 2.0)]
    merged = DataProto.concat([*parts, data])
    assert merged.meta_info["metrics"] == {"loss": [1.0, 2.0], "grad": [1.0, 1.0, 2.0, 2.0]}
    third = data.with_columns(meta_info={"metrics": [{"loss": 3.0}]})
    nested = DataProto.concat([merged, third])
    assert nested.meta_info["metrics"]["loss"] == [1.0, 2.0, 3.0]
    assert "metrics" not in DataProto.concat([data, data]).meta_info
    with pytest.raises(TypeError, match=r'meta_info\["metrics"\] is a float'):
        DataProto.concat([data.with_columns(meta_info={"metrics": 1.0})])


@dataclasses.dataclass
class Node:
    name: str
    parent: Any = None


def circular(kind: str, value: int = 1) -> Any:
    if kind == "list":
        loop: Any = [value]
        loop.append(loop)
    elif kind == "dict":
        loop = {"value": value}
        loop["self"] = [loop]
    elif kind == "dataclass":
        loop = Node(str(value))
        loop.parent = Node("up", loop)
    elif kind == "array":
        loop = np.empty(2, dtype=object)
        loop[:] = [value, None]
        loop[1] = loop
    else:
        loop = value
        for _ in range(5000):
            loop = [loop]
    return loop


def test_values_that_contain_themselves_are_compared() -> None:
    for kind in ("list", "dict", "dataclass", "array", "deep"):
        assert values_equal(circular(kind), circular(kind)), kind
        assert not values_equal(circular(kind), circular(kind, 2)), kind
        left = example().with_columns(non_tensors={"loop": [circular(kind)] * 4}, meta_info={"loop": circular(kind)})
        right = example().with_columns(non_tensors={"loop": [circular(kind)] * 4}, meta_info={"loop": circular(kind)})
        assert len(left.union(right)) == 4
        with pytest.raises(ValueError, match="'loop' has two different values"):
            left.union(right.with_columns(meta_info={"loop": circular(kind, 2)}))
    own, other = deque([1]), deque([1])
    own.append(own)  # type: ignore[arg-type]
    other.append(other)  # type: ignore[arg-type]
    assert not values_equal(own, other)


def test_a_value_that_contains_itself_cannot_be_saved(tmp_path: Path) -> None:
    for kind in ("list", "dict", "array"):
        with pytest.raises(ValueError, match=r"column 'loop' row 0 contains itself"):
            DataProto.from_dict(non_tensors={"loop": [circular(kind)]}).save(tmp_path / "batch")
        with pytest.raises(ValueError, match=r"meta_info\['loop'\] contains itself"):
            DataProto(meta_info={"loop": circular(kind)}).save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_files_and_descriptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = example()
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), data)
    data.print_size("before")
    assert capsys.readouterr().out.startswith("before, 4 rows: tensors 7.45058e-08 GiB")
    assert "ids: int64 (4, 2) on cpu" in data.get_data_info()
    assert "meta_info temperature: float" in data.get_data_info()


def test_a_future_is_a_batch_that_is_not_there_yet() -> None:
    data = example()
    with ThreadPoolExecutor(1) as pool:
        future = DataProtoFuture.concat([pool.submit(part.repeat, 2) for part in data.chunk(2)])
        assert_same(future.get(timeout_s=60), data.repeat(2))
        halves = future.chunk(2)
        assert [uids(half.get(60)) for half in halves] == ["aabb", "ccdd"]
        assert [uids(quarter.get(60)) for quarter in halves[1].chunk(2)] == ["cc", "dd"]
        failed = DataProtoFuture.concat([pool.submit(data.chunk, 3)])
        with pytest.raises(ValueError, match="does not divide 4 rows"):
            failed.get(60)
        with pytest.raises(TypeError, match="part 0 of 1 of a DataProtoFuture is a list"):
            DataProtoFuture.concat([pool.submit(data.chunk, 2)]).get(60)
    never: Future[DataProto] = Future()
    with pytest.raises(WaitTimeout, match="part 0 of 1 of a DataProtoFuture"):
        DataProtoFuture.concat([never]).get(timeout_s=0.01)
    with pytest.raises(ValueError, match="no futures"):
        DataProtoFuture.concat([])


class Reference:
    """As a Ray ObjectRef: not a Future, but it has one."""

    def __init__(self, data: DataProto) -> None:
        self._future: Future[DataProto] = Future()
        self._future.set_result(data)

    def future(self) -> Future[DataProto]:
        return self._future


def test_a_future_takes_references() -> None:
    assert_same(DataProtoFuture.concat([Reference(part) for part in example().chunk(2)]).get(1), example())
