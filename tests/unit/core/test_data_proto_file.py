"""Saving and loading."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_data_proto_strategy import QUICK, assert_same, data_protos

from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "batch.safetensors"


def small() -> DataProto:
    return DataProto.from_dict({"x": torch.arange(3)}, {"uid": ["a", "b", "c"]}, {"note": "kept"})


@QUICK
@given(data=data_protos())
def test_load_returns_what_was_saved(file: Path, data: DataProto) -> None:
    data.save(file)
    loaded = DataProto.load(file)
    assert_same(loaded, data)
    assert list(loaded.batch.keys()) == list(data.batch.keys())
    assert list(loaded.non_tensor_batch) == list(data.non_tensor_batch)


@pytest.mark.parametrize(
    "value",
    [
        2**100,
        float("inf"),
        -0.0,
        "\ud800 lone surrogate",
        b"\x00\xff",
        {1: "int key", (1, 2): "tuple key", None: []},
        {"tuple": ["looks like a tag"]},
        (1, [2, (3,)]),
        {1, 2},
        frozenset({"a"}),
        np.float32(1.5),
        np.float64("nan"),
        np.bool_(True),
        np.str_(""),
        np.datetime64("2020-01-01T00:00:00.123456789"),
        np.array(3),
        np.zeros((0, 2), dtype=np.float16),
        np.arange(6).reshape(2, 3).T,
        np.array(["ab", "c"]),
        np.array([1 + 2j]),
        np.array([[None, "x"], [[1], {}]], dtype=object),
        np.array([1, 2], dtype=">i4"),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.from_numpy(np.empty(0, dtype=np.float32)),
        torch.arange(6).reshape(2, 3).t(),
        {"pixel_values": torch.ones(2, 2), "sizes": [np.arange(2)]},
    ],
    ids=repr,
)
def test_every_plain_value_survives_exactly(file: Path, value: Any) -> None:
    data = DataProto.from_dict(non_tensors={"cell": [value, None]}, meta_info={"value": value})
    data.save(file)
    loaded = DataProto.load(file)
    assert_same(loaded, data)
    assert type(loaded[0].non_tensors["cell"]) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int32, torch.uint16, torch.complex64]
)
def test_tensor_dtypes_survive(file: Path, dtype: torch.dtype) -> None:
    data = DataProto.from_dict({"x": torch.ones(3, 2).to(dtype)})
    data.save(file)
    assert_same(DataProto.load(file), data)


def test_columns_that_share_memory_or_are_views_can_be_saved(file: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    data = DataProto.from_dict(
        {"a": base, "alias": base, "view": base[:, 1:2], "flat": base.t().t(), "t": base[:, :3].t()}
    )
    data.save(file)
    loaded = DataProto.load(file)
    assert_same(loaded, data)
    loaded.batch["a"][0] = -1
    assert loaded.batch["alias"][0, 0] == 0


def test_empty_columns_that_numpy_made_can_be_saved(file: Path) -> None:
    data = DataProto.from_dict({"x": torch.from_numpy(np.empty(0, dtype=np.float32))})
    data.save(file)
    assert_same(DataProto.load(file), data)


def test_tensors_that_autograd_computed_can_be_saved(file: Path) -> None:
    data = DataProto.from_dict({"x": torch.ones(2, requires_grad=True) * 2})
    data.save(file)
    assert_same(DataProto.load(file), data)


def test_a_loaded_batch_does_not_change_with_its_file(file: Path) -> None:
    small().save(file)
    loaded = DataProto.load(file)
    with file.open("r+b") as opened:
        opened.write(bytes([255]) * file.stat().st_size)
    assert_same(loaded, small())


def test_a_part_takes_the_room_of_its_own_rows(file: Path) -> None:
    DataProto.from_dict({"x": torch.zeros(1000, 100)})[:2].save(file)
    assert file.stat().st_size < 4000


def test_rows_without_columns_keep_their_number(file: Path) -> None:
    data = small()
    data.pop(["x"], ["uid"])
    data.save(file)
    assert_same(DataProto.load(file), data)
    assert len(DataProto.load(file)) == 3


def test_other_tools_can_read_the_tensor_columns(file: Path) -> None:
    small().save(file)
    assert safetensors.torch.load_file(file)["column/x"].tolist() == [0, 1, 2]


def test_objects_without_a_plain_form_need_permission_twice(file: Path) -> None:
    data = small().with_columns(non_tensors={"when": [1, datetime.date(2020, 1, 1), 3]})
    with pytest.raises(ValueError, match=r"column 'when' row 1 holds a datetime\.date.*allow_pickle"):
        data.save(file)
    assert not file.exists()
    data.save(file, allow_pickle=True)
    with pytest.raises(DataError, match=r"holds pickled objects.*allow_pickle=True"):
        DataProto.load(file)
    assert_same(DataProto.load(file, allow_pickle=True), data)


def test_meta_info_without_a_plain_form_is_named(file: Path) -> None:
    with pytest.raises(ValueError, match=r"meta_info\['kind'\] holds a builtins\.type"):
        small().with_columns(meta_info={"kind": int}).save(file)


def test_a_dtype_the_file_cannot_hold_is_named(file: Path) -> None:
    with pytest.raises(ValueError, match=r"column/z: .*complex128"):
        DataProto.from_dict({"z": torch.zeros(2, dtype=torch.complex128)}).save(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.safetensors: no such file"):
        DataProto.load(tmp_path / "nowhere.safetensors")
    with pytest.raises(DataError, match="no such file"):
        DataProto.load(tmp_path)


@QUICK
@given(drawn=st.data())
def test_a_changed_byte_anywhere_is_noticed(file: Path, drawn: st.DataObject) -> None:
    data = small().with_columns(non_tensors={"more": [np.arange(3), "text", {"k": (1,)}]})
    data.save(file)
    content = bytearray(file.read_bytes())
    position = drawn.draw(st.integers(0, len(content) - 1))
    content[position] ^= drawn.draw(st.integers(1, 255))
    file.write_bytes(content)
    try:
        loaded = DataProto.load(file)
    except DataError:
        return
    # Some bytes of the header, such as the blanks that pad it, carry nothing.
    assert_same(loaded, data)


@QUICK
@given(drawn=st.data())
def test_a_cut_file_is_noticed(file: Path, drawn: st.DataObject) -> None:
    small().save(file)
    content = file.read_bytes()
    file.write_bytes(content[: drawn.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DataError, match="damaged"):
        DataProto.load(file)


def test_another_safetensors_file_is_refused(file: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(2)}, file)
    with pytest.raises(DataError, match=r"format is None, not 'headwater\.DataProto/1'"):
        DataProto.load(file)


def test_saving_makes_folders_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    file = tmp_path / "dumps" / "step_1.safetensors"
    small().save(file)
    small().repeat(2).save(str(file))
    assert os.listdir(file.parent) == ["step_1.safetensors"]
    assert len(DataProto.load(file)) == 6


def test_a_failed_save_keeps_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small().save(file)

    def full_disk(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        small().repeat(2).save(file)
    assert os.listdir(file.parent) == [file.name]
    assert_same(DataProto.load(file), small())
