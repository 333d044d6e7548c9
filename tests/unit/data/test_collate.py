from __future__ import annotations

import pytest
import torch

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.core.records import Prompt
from headwater.data.rlhf_dataset import RLHFDataset, collate


def prompt(uid, tokens, **fields):
    return Prompt(
        uid=uid, messages=({"role": "user", "content": uid},), text=uid, tokens=tokens, data_source="s", **fields
    )


def test_padded_on_the_left():
    batch = collate([prompt("a", (5, 6, 7)), prompt("b", (8,)), prompt("c", (0, 9))], pad_token_id=0).batch
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8], [0, 0, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 1]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.long}


def test_every_other_field_is_an_object_column():
    prompts = [
        prompt("a", (1,), ground_truth=[1, 2], extra_info={"index": 0}, tools_kwargs={"t": {}}),
        prompt(
            "b",
            (1,),
            ground_truth=[3, 4],
            media=(PlacedMedia(MediaContent.of("image", [b"picture"]), (MediaBlock(0, 1),)),),
        ),
    ]
    columns = collate(prompts, pad_token_id=0).non_tensor_batch
    assert set(columns) == {
        "uid", "text", "data_source", "ground_truth", "extra_info", "tools_kwargs", "tool_schemas", "messages",
        "media", "columns", "source",
    }  # fmt: skip
    for name, column in columns.items():
        assert column.dtype == object
        assert list(column) == [getattr(each, name) for each in prompts]


def test_a_dataset_collates(tokenizer):
    dataset = RLHFDataset(["arithmetic"], DataConfig(num_train_rows=6), tokenizer)
    data = collate(list(dataset), tokenizer.pad_token_id)
    assert len(data) == 6
    for row, each in enumerate(dataset):
        mask = data.batch["attention_mask"][row].bool()
        assert tuple(data.batch["input_ids"][row][mask].tolist()) == each.tokens


def test_nothing_to_collate():
    with pytest.raises(DataError, match="got no prompts"):
        collate([], pad_token_id=0)
