from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.data import measure
from headwater.data.measure import ROWS_PER_CHUNK, choose_num_workers
from headwater.data.rlhf_dataset import RLHFDataset, cut_tokens

OVERHEAD = len("[user][assistant]") + 1
"""Tokens the chat template adds to a message; ``<|end|>`` is one."""


def rows_of(*lengths):
    return [{"prompt": "x" * (length - OVERHEAD), "ground_truth": number} for number, length in enumerate(lengths)]


def test_cuts():
    tokens = tuple(range(10))
    assert cut_tokens(tokens, 5, "left") == (5, 6, 7, 8, 9)
    assert cut_tokens(tokens, 5, "right") == (0, 1, 2, 3, 4)
    assert cut_tokens(tokens, 5, "middle") == (0, 1, 7, 8, 9)
    assert cut_tokens(tokens, 4, "middle") == (0, 1, 8, 9)
    assert cut_tokens(tokens, 1, "middle") == (9,)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["left", "right", "middle"]))
def test_a_cut_never_exceeds_the_limit_and_loses_no_more_than_it_must(length, limit, cut):
    tokens = tuple(range(length))
    kept = cut_tokens(tokens, limit, cut)
    assert len(kept) == min(length, limit)
    assert list(kept) == sorted(set(kept))


def test_filter_keeps_the_original_row_numbers(tokenizer, write_jsonl):
    sources = [write_jsonl(rows_of(30, 41, 40), "a.jsonl"), write_jsonl(rows_of(99, 20), "b.jsonl")]
    dataset = RLHFDataset(sources, DataConfig(max_prompt_tokens=40), tokenizer)
    assert [dataset[index].uid for index in range(3)] == ["a/train/0", "a/train/2", "b/train/1"]
    assert [len(dataset[index].tokens) for index in range(3)] == [30, 40, 20]
    assert dataset.num_filtered == 2


def test_all_rows_filtered(tokenizer, write_jsonl):
    with pytest.raises(
        DataError, match=r"rows: all 2 rows are longer than data.max_prompt_tokens = 40 \(the shortest has 50"
    ):
        RLHFDataset([write_jsonl(rows_of(60, 50))], DataConfig(max_prompt_tokens=40), tokenizer)


@pytest.mark.parametrize("cut", ["left", "right", "middle"])
def test_truncation(tokenizer, write_jsonl, cut):
    path = write_jsonl(rows_of(30, 50))
    dataset = RLHFDataset([path], DataConfig(max_prompt_tokens=40, truncation=cut), tokenizer)
    full = RLHFDataset([path], DataConfig(max_prompt_tokens=99), tokenizer)
    assert dataset.num_filtered == 0
    assert dataset[0] == full[0]
    assert dataset[1].tokens == cut_tokens(full[1].tokens, 40, cut)
    assert dataset[1].text == full[1].text


def test_error_mode_stops_at_construction(tokenizer, write_jsonl):
    path = write_jsonl(rows_of(30, 41, 30, 90))
    with pytest.raises(DataError) as caught:
        RLHFDataset([path], DataConfig(max_prompt_tokens=40, truncation="error"), tokenizer)
    message = str(caught.value)
    assert f"{path}, line 2: prompt of 41 tokens, data.max_prompt_tokens = 40" in message
    assert "2 of 4 rows are too long" in message
    assert "set truncation to filter" in message
    assert len(RLHFDataset([path], DataConfig(max_prompt_tokens=90, truncation="error"), tokenizer)) == 4


def test_cutting_modes_read_rows_only_when_asked(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\nbroken\n')
    dataset = RLHFDataset([str(path)], DataConfig(truncation="left"), tokenizer)
    assert dataset[0].messages[0]["content"] == "fine"
    with pytest.raises(DataError, match="line 2: not JSON"):
        dataset[1]


def test_number_of_workers():
    assert choose_num_workers(0, 100) == 1
    assert choose_num_workers(0, 19_999) == 1
    assert 1 <= choose_num_workers(0, 1_000_000) <= 8
    assert choose_num_workers(5, 1_000_000) == 5
    assert choose_num_workers(5, ROWS_PER_CHUNK) == 1
    assert choose_num_workers(5, ROWS_PER_CHUNK + 1) == 2


def test_workers_change_nothing(tokenizer, write_jsonl, monkeypatch):
    monkeypatch.setattr(measure, "ROWS_PER_CHUNK", 20)
    lengths = [OVERHEAD + 1 + (number * 37) % 60 for number in range(55)]
    path = write_jsonl(rows_of(*lengths))
    alone, together = (
        RLHFDataset([path], DataConfig(max_prompt_tokens=50, num_filter_workers=workers), tokenizer)
        for workers in (1, 2)
    )
    kept = [number for number, length in enumerate(lengths) if length <= 50]
    assert 0 < len(kept) < len(lengths)
    assert [prompt.uid for prompt in together] == [f"rows/train/{number}" for number in kept]
    assert list(alone) == list(together)
    assert alone.num_filtered == together.num_filtered == len(lengths) - len(kept)


def test_workers_raise_the_first_error_in_row_order(tokenizer, write_jsonl, tmp_path):
    """The row that a worker refuses stands before the line that this process cannot read, in another chunk."""
    path = write_jsonl([{"prompt": "x"}] * (2 * ROWS_PER_CHUNK))
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    lines[ROWS_PER_CHUNK - 6] = '{"prompt": 3}'
    lines[ROWS_PER_CHUNK + 4] = "broken"
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    messages = []
    for workers in (1, 2):
        with pytest.raises(DataError) as caught:
            RLHFDataset([path], DataConfig(num_filter_workers=workers), tokenizer)
        messages.append(str(caught.value))
    assert (
        messages[0]
        == messages[1]
        == f"{path}, line {ROWS_PER_CHUNK - 5}: prompt is a int; " + ("must be a list of messages or a string")
    )


@pytest.mark.slow
def test_unreadable_line_in_parallel(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n' * (ROWS_PER_CHUNK + 10) + "broken\n")
    with pytest.raises(DataError, match=rf"line {ROWS_PER_CHUNK + 11}: not JSON"):
        RLHFDataset([str(path)], DataConfig(num_filter_workers=2), tokenizer)


def test_tokenizer_that_cannot_travel(write_jsonl):
    class Local:
        chat_template = "x"
        unpicklable = staticmethod(lambda: None)

        def apply_chat_template(self, conversation, **kwargs):
            return "x"

        def encode(self, text, **kwargs):
            return [1]

    path = write_jsonl([{"prompt": "x"}] * (ROWS_PER_CHUNK + 1))
    with pytest.raises(DataError, match=r"cannot be sent to another process.*set data.num_filter_workers=1"):
        RLHFDataset([path], DataConfig(num_filter_workers=2), Local())
    assert len(RLHFDataset([path], DataConfig(num_filter_workers=1), Local())) == ROWS_PER_CHUNK + 1
