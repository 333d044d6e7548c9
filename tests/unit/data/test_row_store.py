from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from headwater.core.errors import DataError
from headwater.data.row_store import JsonlRows, JsonRows, ListRows, ParquetRows

ROWS = [{"prompt": f"p{number}", "extra_info": {"index": number, "words": ["a"] * number}} for number in range(7)]


def test_parquet_rows_across_row_groups(tmp_path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)
    rows = ParquetRows(path)
    assert [rows[index] for index in range(len(rows))] == ROWS
    assert rows.name == "train"
    assert rows.folder == tmp_path
    assert rows.place(3) == f"{path}, row 3"


def test_jsonl_rows_keep_their_own_keys_and_line_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"b": {"c": [1, "\xc3\xa9"]}}\n{"a": "2"}')
    rows = JsonlRows(path)
    assert [rows[index] for index in range(len(rows))] == [{"a": 1}, {"b": {"c": [1, "é"]}}, {"a": "2"}]
    assert [rows.place(index) for index in range(3)] == [f"{path}, line {line}" for line in (1, 4, 5)]


def test_json_rows(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS))
    rows = JsonRows(path)
    assert [rows[index] for index in range(len(rows))] == ROWS
    assert rows.place(1) == f"{path}, row 1"


def test_list_rows():
    rows = ListRows(ROWS, name="mine", label="task mine")
    assert rows[2] == ROWS[2]
    assert rows.place(2) == "task mine, row 2"


@pytest.mark.parametrize(("store", "suffix"), [(ParquetRows, "parquet"), (JsonlRows, "jsonl"), (JsonRows, "json")])
class TestBadFiles:
    def test_missing(self, tmp_path, store, suffix):
        with pytest.raises(DataError, match=f"absent.{suffix}: no such file.*check data.train"):
            store(tmp_path / f"absent.{suffix}")

    def test_folder(self, tmp_path, store, suffix):
        folder = tmp_path / f"folder.{suffix}"
        folder.mkdir()
        with pytest.raises(DataError, match=f"folder.{suffix}: is a folder; name the files"):
            store(folder)

    def test_empty_file(self, tmp_path, store, suffix):
        path = tmp_path / f"empty.{suffix}"
        path.touch()
        with pytest.raises(DataError, match=f"empty.{suffix}: the file is empty"):
            store(path)

    def test_no_rows(self, tmp_path, store, suffix):
        path = tmp_path / f"none.{suffix}"
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
        else:
            path.write_text({"jsonl": "\n\n", "json": "[]"}[suffix])
        with pytest.raises(DataError, match=f"none.{suffix}: has no rows"):
            store(path)


def test_corrupt_parquet(tmp_path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train.parquet: not a readable parquet file"):
        ParquetRows(path)
    path.write_text("prompt,answer\n1,2\n")
    with pytest.raises(DataError, match=r"train.parquet: not a readable parquet file"):
        ParquetRows(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ', "line 2: not JSON"),
        (b'{"prompt": "\xff"}', "line 2: not JSON"),
        (b"[1, 2]", "line 2: is an array; must be an object"),
        (b'"text"', "line 2: is a string; must be an object"),
    ],
)
def test_bad_jsonl_line_is_named_when_read(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    rows = JsonlRows(path)
    assert rows[0] == {"prompt": "good"}
    with pytest.raises(DataError, match=message):
        rows[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": 1}', "holds an object; must be an array"), ('{"a": 1}\n{"a": 2}', "not JSON.*named .jsonl")],
)
def test_json_file_of_another_shape(tmp_path, text, message):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        JsonRows(path)
    path.write_text('[{"a": 1}, 2]')
    with pytest.raises(DataError, match="row 1: is a int; must be an object"):
        JsonRows(path)[1]
