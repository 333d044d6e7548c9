"""A stream of prompts continues only with the rows of its checkpoint."""

from __future__ import annotations

import datetime
import json
import logging
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.data.digest import MAX_ROWS, row_digest
from headwater.data.load import DigestedDataset
from headwater.data.rlhf_dataset import RLHFDataset
from headwater.rollout.source import PromptStream

ROWS = [
    {"prompt": f"{number}+1=", "ground_truth": str(number + 1), "level": {"of": number % 3}} for number in range(40)
]


def stream(tokenizer, source, **settings) -> PromptStream:
    return PromptStream(RLHFDataset([source], DataConfig(**settings), tokenizer), seed=0, shuffle=True)


def state_of(of: PromptStream) -> dict:
    of.take(5)
    return json.loads(json.dumps(of.state_dict()))


def changed(number: int, **columns) -> list[dict]:
    return [*ROWS[:number], {**ROWS[number], **columns}, *ROWS[number + 1 :]]


@pytest.mark.parametrize("truncation", ["filter", "left"])
def test_other_rows_are_refused_with_what_differs(tokenizer, truncation):
    state = state_of(stream(tokenizer, ROWS, truncation=truncation))
    for rows, what in (
        (changed(7, ground_truth="0"), "1 of 40 rows are not those of the checkpoint, the first is row {}/7"),
        (changed(39, level={"of": 5}), "1 of 40 rows are not those of the checkpoint, the first is row {}/39"),
        ([*ROWS[:3], ROWS[4], ROWS[3], *ROWS[5:]], "in another order: 2 of 40 rows moved, the first is row {}/3"),
        (ROWS[:-1], "num_rows = 40 in the checkpoint, 39 now"),
    ):  # fmt: skip
        with pytest.raises(DataError) as caught:
            stream(tokenizer, rows, truncation=truncation).load_state_dict(state)
        assert what.format("dataset/train") in str(caught.value)
        assert "data.train" in str(caught.value)
        assert "resume with the data as they were, or start a new run" in str(caught.value)


def test_rows_may_be_rendered_in_another_way(tokenizer):
    """The digest is of the source: a system prompt or template is no other row."""
    other = stream(tokenizer, ROWS, system_prompt="Think.", truncation="left")
    other.load_state_dict(state_of(stream(tokenizer, ROWS)))
    assert [draw.index for draw in other.take(3)] == [draw.index for draw in stream(tokenizer, ROWS).take(8)[5:]]


def test_a_file_may_be_moved_and_written_again(tokenizer, write_jsonl, tmp_path):
    state = state_of(stream(tokenizer, write_jsonl(ROWS)))
    moved = tmp_path / "elsewhere" / "other.jsonl"
    moved.parent.mkdir()
    moved.write_text("".join(f"{json.dumps(dict(reversed(row.items())), indent=None)} \n\n" for row in ROWS))
    stream(tokenizer, str(moved)).load_state_dict(state)


def test_a_checkpoint_without_digests_is_resumed_with_a_notice(tokenizer, caplog):
    state = state_of(stream(tokenizer, ROWS))
    del state["rows"]
    with caplog.at_level(logging.WARNING):
        stream(tokenizer, changed(7, ground_truth="0")).load_state_dict(state)
    assert "only the number of rows was compared" in caplog.text


def test_of_many_rows_some_are_compared(tokenizer):
    class Many:
        def __init__(self, ground_truth: str) -> None:
            self.ground_truth, self.num_read = ground_truth, 0

        def __len__(self) -> int:
            return 50 * MAX_ROWS

        def __getitem__(self, index: int) -> dict:
            self.num_read += 1
            return {"prompt": str(index), "ground_truth": self.ground_truth}

    rows = Many("1")
    state = state_of(stream(tokenizer, rows, truncation="left"))
    assert rows.num_read == MAX_ROWS + 5
    with pytest.raises(DataError, match=r"10,000 of 10,000 rows that were compared are not those .* dataset/train/0;"):
        stream(tokenizer, Many("2"), truncation="left").load_state_dict(state)


def test_a_class_without_digests_is_compared_by_its_number_of_rows(tokenizer, caplog):
    class Two:
        def __init__(self, text: str) -> None:
            self.rows = RLHFDataset([[{"prompt": text}] * 2], DataConfig(), tokenizer)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int):
            return self.rows[index]

    class Digested(Two):
        def row_digest(self, index: int) -> int:
            return -self.rows.row_digest(index)

    class Longer(RLHFDataset):
        def __len__(self) -> int:
            return 2 * super().__len__()

        def __getitem__(self, index: int):
            return super().__getitem__(index // 2)

    def streams(dataset):
        return PromptStream(dataset, seed=0, shuffle=False)

    streams(Two("b")).load_state_dict(state_of(streams(Two("a"))))
    assert not caplog.text
    assert not isinstance(Two("a"), DigestedDataset)
    with pytest.raises(DataError, match="2 of 2 rows are not those"):
        streams(Digested("b")).load_state_dict(state_of(streams(Digested("a"))))
    state = state_of(streams(Longer([ROWS], DataConfig(), tokenizer)))
    with pytest.raises(DataError, match="of 80 rows are not those"):
        streams(Longer([changed(3, ground_truth="")], DataConfig(), tokenizer)).load_state_dict(state)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), PLAIN))
def test_any_row_has_a_digest_that_its_columns_decide(row):
    assert row_digest(row) == row_digest(dict(reversed(row.items())))
    assert row_digest(row) != row_digest({**row, "one more": 1})


def test_digests_tell_values_apart_and_are_the_same_in_every_process():
    black, white = Image.new("RGB", (2, 3)), Image.new("RGB", (2, 3), "white")
    rows = [
        {}, {"a": 1}, {"a": "1"}, {"a": None}, {"a": [1, 2]}, {"a": [2, 1]}, {"a": b"1"}, {"a": {"b": 1}},
        {"a": {1: 2, "1": 3}}, {"a": {(1, 2): 3}}, {"a": {4, 5}}, {"a": {4, 6}}, {"a": datetime.date(2020, 1, 1)},
        {"a": black}, {"a": white}, {"a": np.zeros((2, 3))}, {"a": np.zeros((3, 2))}, {"a": np.array([None, "x"])},
    ]  # fmt: skip
    assert len({row_digest(row) for row in rows}) == len(rows)
    assert row_digest({"a": np.int64(1)}) == row_digest({"a": 1}), "as parquet and JSON give it"
    assert row_digest({"a": object()}) == row_digest({"a": object()}), "not by its address"
    code = "from headwater.data.digest import row_digest; print(row_digest({'a': {'x', 'y', 'z'}, 'b': 0.1}))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(asked.stdout) == row_digest({"a": {"x", "y", "z"}, "b": 0.1})


def test_folders_of_images_may_be_moved():
    def digest(images):
        return row_digest({"prompt": "<image>", "images": images}, ("images", "videos"))

    assert digest(["/old/a.png"]) == digest(["/new/place/a.png"]) != digest(["/old/b.png"])
    assert digest({"bytes": None, "path": "/old/a.png"}) == digest({"bytes": None, "path": "a.png"})
    assert digest({"bytes": b"1"}) != digest({"bytes": b"2"})
    assert digest("data:image/png;base64,a/b") != digest("data:image/png;base64,c/b")
