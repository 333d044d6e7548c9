"""Prompts that offer tools: what the model reads, which row offers what, and how long the prompts are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.data.load import load_dataset
from headwater.data.rlhf_dataset import RLHFDataset
from headwater.tools.schema import OfferedTools

OFFERED = OfferedTools(
    {name: {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("search", "sum")}
)
ROWS = [
    {"prompt": [{"role": "user", "content": "Hi"}]},
    {"prompt": [{"role": "user", "content": "Hi"}], "extra_info": {"tool_selection": ["sum"]}},
    {"prompt": [{"role": "user", "content": "Hi"}], "extra_info": {"tool_selection": []}},
]


class Rows(list):
    """A dataset object."""

    name = "rows"


def dataset(rows=ROWS, offered=OFFERED, **settings) -> RLHFDataset:
    return RLHFDataset([Rows(rows)], DataConfig(**settings), tiny.tokenizer(), tools=offered)


def test_a_row_offers_the_tools_that_it_selects():
    prompts = list(dataset())
    assert [each.text for each in prompts] == [
        "<|system|>Tools:\nsearch()\nsum()<|end|><|user|>Hi<|end|><|assistant|>",
        "<|system|>Tools:\nsum()<|end|><|user|>Hi<|end|><|assistant|>",
        "<|user|>Hi<|end|><|assistant|>",
    ]
    assert [[schema["function"]["name"] for schema in each.tool_schemas] for each in prompts] == [
        ["search", "sum"], ["sum"], [],
    ]  # fmt: skip


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_schemas_count_towards_the_length_in_every_process(num_workers):
    lengths = [len(each.tokens) for each in dataset()]
    kept = dataset(ROWS * 200, max_prompt_tokens=lengths[1], num_filter_workers=num_workers)
    assert (len(kept), kept.longest_prompt) == (400, lengths[1])


def test_what_is_wrong_is_named():
    for rows, offered, settings, message in (
        ([{**ROWS[0], "extra_info": {"tool_selection": ["sun"]}}], OFFERED, {}, "row.*has 'sun'; did you mean 'sum'"),
        ([{**ROWS[0], "extra_info": {"tool_selection": "sum"}}], OFFERED, {}, "must be a list of tool names"),
        (ROWS, OFFERED, {"chat_template_args": {"tools": []}}, r"chat_template_args\.tools: .*remove one of the two"),
    ):
        with pytest.raises(DataError, match=message):
            dataset(rows, offered, **settings)


def test_a_custom_dataset_is_told_about_the_tools(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from headwater.data.rlhf_dataset import RLHFDataset\n"
        "class Old:\n"
        "    def __init__(self, sources, config, tokenizer, split, seed, num_rows, processor): pass\n"
        "class New(RLHFDataset): pass\n"
    )
    config = DataConfig(train=("largest_digit",), num_train_rows=2, dataset=f"{tmp_path / 'mine.py'}:New")
    prompts = load_dataset(config, tiny.tokenizer(), "train", 0, None, OFFERED)
    assert len(prompts[0].tool_schemas) == 2
    old = replace(config, dataset=f"{tmp_path / 'mine.py'}:Old")
    with pytest.raises(DataError, match="keyword argument 'tools'"):
        load_dataset(old, tiny.tokenizer(), "train", 0, None, OFFERED)
