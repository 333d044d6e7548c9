"""Building a DataProto, choosing its columns, and the batch as a whole, by example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from test_data_proto_strategy import example, uids

from headwater.core.columns import values_equal
from headwater.core.data_proto import DataProto


def test_lists_of_equal_length_stay_one_object_per_row() -> None:
    for values in ([[1, 2], [3, 4]], [np.zeros(2), np.ones(2)], [(1, 2), (3, 4)], [torch.zeros(2), torch.ones(2)]):
        column = DataProto.from_dict(non_tensors={"x": values}).non_tensor_batch["x"]
        assert column.shape == (2,)
        assert column.dtype == object
        assert all(cell is value for cell, value in zip(column, values, strict=True))


def test_arrays_become_one_object_per_row() -> None:
    data = DataProto.from_dict(non_tensors={"matrix": np.arange(6).reshape(2, 3), "number": np.array([7, 8])})
    assert data[1].non_tensors["matrix"].tolist() == [3, 4, 5]
    assert type(data[0].non_tensors["number"]) is int
    nanoseconds = np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[ns]")
    assert DataProto.from_dict(non_tensors={"when": nanoseconds})[1].non_tensors["when"] == nanoseconds[1]


def test_from_single_dict_sorts_columns_by_kind() -> None:
    data = DataProto.from_single_dict({"x": torch.zeros(2), "y": np.array([1, 2]), "z": ["a", "b"]}, {"step": 1})
    assert list(data.batch.keys()) == ["x"]
    assert list(data.non_tensor_batch) == ["y", "z"]
    assert data.meta_info == {"step": 1}


def test_a_batch_may_have_one_kind_of_column_or_none() -> None:
    assert len(DataProto.from_dict(tensors={"x": torch.zeros(3)})) == 3
    assert len(DataProto.from_dict(non_tensors={"x": [1, 2]})) == 2
    assert len(DataProto()) == 0
    assert len(DataProto(TensorDict({}, batch_size=[5]))) == 5
    assert len(DataProto().with_columns(tensors={"x": torch.zeros(3)})) == 3


def test_building_copies_the_containers_it_is_given() -> None:
    batch, meta_info = TensorDict({"x": torch.zeros(2)}, batch_size=[2]), {"step": 1}
    data = DataProto(batch, {"uid": ["a", "b"]}, meta_info)
    batch["y"] = torch.zeros(2)
    meta_info["step"] = 2
    assert list(data.batch.keys()) == ["x"]
    assert data.meta_info == {"step": 1}


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: DataProto.from_dict({"x": torch.zeros(2), "y": torch.zeros(3)}), ValueError, "'y' has 3 rows.* has 2"),
        (lambda: DataProto.from_dict({"x": torch.zeros(2)}, {"y": [1]}), ValueError, "'y' has 1 rows.* has 2"),
        (lambda: DataProto.from_dict(non_tensors={"x": [1, 2], "y": [1]}), ValueError, "'y' has 1 rows.* has 2"),
        (lambda: example().with_columns({"ids": torch.zeros(3)}), ValueError, "'ids' has 3 rows.* has 4"),
        (lambda: example().with_columns(non_tensors={"new": [1]}), ValueError, "'new' has 1 rows.* has 4"),
        (lambda: DataProto.from_dict({"x": torch.tensor(1.0)}), ValueError, "'x' is a scalar"),
        (lambda: DataProto.from_dict({"x": [1, 2]}), TypeError, "'x' is a list; convert it with torch.as_tensor"),
        (
            lambda: DataProto.from_dict({"x": TensorDict({}, batch_size=[2])}),
            TypeError,
            "'x' is a TensorDict; nested TensorDicts are not supported, flatten",
        ),
        (
            lambda: DataProto(TensorDict({"x": {"y": torch.zeros(2)}}, batch_size=[2])),
            TypeError,
            "'x' is a TensorDict; nested TensorDicts are not supported, flatten",
        ),
        (lambda: DataProto.from_dict({"x": torch.eye(2).to_sparse()}), TypeError, "'x' is nested or sparse; pad it"),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 3])), ValueError, r"batch_size = \(2, 3\): .* one dimension"),
        (lambda: DataProto({"x": torch.zeros(2)}), TypeError, "batch is a dict; .* use DataProto.from_dict"),
        (lambda: DataProto.from_dict(non_tensors={"x": torch.zeros(2)}), TypeError, "'x' is a tensor; pass it with"),
        (lambda: DataProto.from_dict(non_tensors={"x": "ab"}), TypeError, "'x' is a str; pass a list"),
        (lambda: DataProto.from_dict(non_tensors={"x": {1, 2}}), TypeError, "'x' is a set; pass a list"),
        (lambda: DataProto.from_dict(non_tensors={"x": np.array(1)}), ValueError, "'x': a 0-d array has no rows"),
        (
            lambda: DataProto.from_dict({"x": torch.zeros(1)}, {"x": [1]}),
            ValueError,
            "'x' is both a tensor and an object",
        ),
        (lambda: DataProto.from_single_dict({1: torch.zeros(1)}), TypeError, "column name 1 is a int"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(build: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_select_keeps_all_of_a_kind_that_is_not_named() -> None:
    selected = example().select(batch_keys=["reward", "reward"])
    assert list(selected.batch.keys()) == ["reward"]
    assert list(selected.non_tensor_batch) == ["uid", "turns"]
    assert selected.meta_info == {"temperature": 1.0}
    assert len(example().select([], [], [])) == 4


def test_a_deep_copy_shares_nothing() -> None:
    data = example().with_columns(meta_info={"list": [1]})
    shallow, deep = data.select(), data.select(deepcopy=True)
    data.batch["ids"][0] = 99
    data.non_tensor_batch["turns"][0].append(99)
    data.meta_info["list"].append(99)
    assert shallow[0].tensors["ids"].tolist() == [99, 99]
    assert shallow[0].non_tensors["turns"] == [1, 99]
    assert deep[0].tensors["ids"].tolist() == [0, 1]
    assert deep[0].non_tensors["turns"] == [1]
    assert deep.meta_info["list"] == [1]


def test_pop_takes_only_what_is_named() -> None:
    data = example()
    popped = data.pop(batch_keys=["ids"], non_tensor_keys=["uid"])
    assert (list(popped.batch.keys()), list(popped.non_tensor_batch), popped.meta_info) == (["ids"], ["uid"], {})
    assert (list(data.batch.keys()), list(data.non_tensor_batch)) == (["reward"], ["turns"])
    assert data.meta_info == {"temperature": 1.0}
    assert data.pop(meta_keys=["temperature"]).meta_info == {"temperature": 1.0}
    assert data.meta_info == {}


def test_a_pop_that_fails_takes_nothing() -> None:
    data = example()
    with pytest.raises(KeyError, match="non_tensor_keys: no 'ids'; known: uid, turns"):
        data.pop(batch_keys=["ids"], non_tensor_keys=["ids"])
    assert data.equals(example())


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"batch_keys": ["uid"]}, KeyError, "batch_keys: no 'uid'; known: ids, reward"),
        ({"non_tensor_keys": ["x"]}, KeyError, "non_tensor_keys: no 'x'; known: uid, turns"),
        ({"meta_keys": ["x"]}, KeyError, "meta_keys: no 'x'; known: temperature"),
        ({"batch_keys": "ids"}, TypeError, r"pass a list of names, \['ids'\]"),
    ],
)
def test_unknown_keys_list_the_known_ones(keys: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        example().select(**keys)
    with pytest.raises(error, match=message):
        example().pop(**keys)


def test_with_columns_adds_and_replaces() -> None:
    data = example().with_columns({"reward": torch.ones(4)}, {"new": ["wxyz"] * 4}, {"temperature": 0.0})
    assert data.batch["reward"].tolist() == [1, 1, 1, 1]
    assert data.non_tensor_batch["new"].tolist() == ["wxyz"] * 4
    assert data.meta_info == {"temperature": 0.0}


def test_rename() -> None:
    renamed = example().rename("ids", "tokens").rename("uid", "name").rename("name", "name")
    assert list(renamed.batch.keys()) == ["tokens", "reward"]
    assert list(renamed.non_tensor_batch) == ["name", "turns"]
    with pytest.raises(ValueError, match="rename 'ids' to 'uid': column 'uid' already exists; pop it first"):
        example().rename("ids", "uid")
    with pytest.raises(KeyError, match="no 'x'; known: ids, reward, uid, turns"):
        example().rename("x", "y")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataProto.from_dict({"x": torch.zeros(3)}), "union of 4 and 3 rows"),
        (DataProto.from_dict({"reward": torch.zeros(4)}), "tensor column 'reward' has two different values"),
        (DataProto.from_dict({"reward": torch.arange(4)}), "tensor column 'reward' has two different values"),
        (DataProto.from_dict(non_tensors={"uid": list("abcx")}), "object column 'uid' has two different values"),
        (DataProto.from_dict(non_tensors={"ids": list("abcd")}), "'ids' is both a tensor and an object column"),
        (
            DataProto.from_dict({"x": torch.zeros(4)}, meta_info={"temperature": 2.0}),
            "meta_info 'temperature' has two different values, 1.0 and 2.0; pop or rename",
        ),
    ],
)
def test_a_union_that_cannot_be_is_explained(other: DataProto, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example().union(other)


def test_batches_without_columns_differ_by_their_rows() -> None:
    two, three = (DataProto(TensorDict({}, batch_size=[num_rows])) for num_rows in (2, 3))
    assert two.equals(three[:2])
    assert not two.equals(three)


def test_to_moves_tensors_only() -> None:
    moved = example().to("meta")
    assert {tensor.device.type for _, tensor in moved.batch.items()} == {"meta"}
    assert uids(moved) == "abcd"


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda data: data.non_tensor_batch.update(uid=["a"]), TypeError, "'uid' is a list, not a 1-D object array"),
        (
            lambda data: data.non_tensor_batch.update(uid=np.zeros(4)),
            TypeError,
            r"'uid' is a float64 array of shape \(4,\)",
        ),
        (
            lambda data: data.non_tensor_batch.update(uid=np.zeros((4, 2), dtype=object)),
            TypeError,
            r"'uid' is a object array of shape \(4, 2\)",
        ),
        (lambda data: data.non_tensor_batch.update(uid=np.empty(3, dtype=object)), ValueError, "'uid' has 3 rows"),
        (lambda data: data.non_tensor_batch.update(ids=np.empty(4, dtype=object)), ValueError, "'ids' is both"),
        (
            lambda data: data.batch.update({"x": TensorDict({}, batch_size=[4])}),
            TypeError,
            "'x' is a TensorDict; nested",
        ),
        (lambda data: setattr(data.batch, "batch_size", [4, 2]), ValueError, "one dimension"),
    ],
)
def test_check_consistency_finds_what_was_spoilt_by_hand(
    spoil: Callable[[DataProto], Any], error: type[Exception], message: str
) -> None:
    data = example().select(batch_keys=["ids"])
    data.check_consistency()
    spoil(data)
    with pytest.raises(error, match=message):
        data.check_consistency()


def test_repr_tells_rows_names_shapes_and_dtypes() -> None:
    assert repr(example()).splitlines() == [
        "DataProto(4 rows)",
        "  ids: int64 (4, 2) on cpu",
        "  reward: float32 (4,) on cpu",
        "  uid: object (4,) of str",
        "  turns: object (4,) of list",
        "  meta_info: temperature",
    ]


@dataclass
class Image:
    pixels: np.ndarray


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (float("nan"), float("nan"), True),
        (np.float32("nan"), np.float32("nan"), True),
        ([1, float("nan")], [1, float("nan")], True),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 1.0]), False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1, 2]), np.array([1.0, 2.0]), False),
        (np.array([[1], None], dtype=object), np.array([[1], None], dtype=object), True),
        (np.array([[1], None], dtype=object), np.array([[2], None], dtype=object), False),
        (Image(np.zeros(2)), Image(np.zeros(2)), True),
        (Image(np.zeros(2)), Image(np.ones(2)), False),
        ({"a": np.zeros(2)}, {"a": np.zeros(2)}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1], [1, 2], False),
        ([1], (1,), False),
        (1, True, False),
        (1, 1.0, False),
        (None, None, True),
        ("a", "b", False),
    ],
)
def test_equal_values_have_the_same_type_and_content(left: Any, right: Any, equal: bool) -> None:
    assert values_equal(left, right) is equal
    assert values_equal(right, left) is equal
