from __future__ import annotations

import pytest

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError, UnknownName
from headwater.data.load import load_dataset, readable_prompts
from headwater.data.rlhf_dataset import RLHFDataset

USER_DATASET = """
from headwater.core.records import Prompt

class Mine:
    def __init__(self, sources, config, tokenizer, *, split, seed, num_rows, processor):
        self.label = f"{list(sources)} {split} {seed}"
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return Prompt(uid=f"mine/{index}", messages=(), text=self.label, tokens=(1,), data_source="mine")

class Empty(Mine):
    def __len__(self):
        return 0

class Dicts(Mine):
    def __getitem__(self, index):
        return {"prompt": "x"}

class NoLength:
    def __init__(self, **kwargs):
        pass

class OtherArguments:
    def __init__(self, files):
        pass

instance = 3
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "my_dataset.py"
    path.write_text(USER_DATASET)
    return str(path)


def questions(dataset):
    return {dataset[index].text for index in range(len(dataset))}


def test_train_and_held_out_split_of_a_task(tokenizer):
    config = DataConfig(num_train_rows=40, num_eval_rows=10)
    train = load_dataset(config, tokenizer, "train", 0)
    held_out = load_dataset(config, tokenizer, "eval", 0)
    assert isinstance(train, RLHFDataset)
    assert (len(train), len(held_out)) == (40, 10)
    assert not questions(train) & questions(held_out)
    assert held_out[0].uid == "arithmetic/eval/0"


def test_files_have_no_held_out_split(tokenizer, write_jsonl):
    path = write_jsonl([{"prompt": "a"}])
    assert load_dataset(DataConfig(train=(path,)), tokenizer, "eval", 0) is None
    both = load_dataset(DataConfig(train=(path, "arithmetic"), num_eval_rows=3), tokenizer, "eval", 0)
    assert [both[index].uid for index in range(3)] == [f"arithmetic/eval/{row}" for row in range(3)]


def test_eval_files(tokenizer, write_jsonl):
    test = write_jsonl([{"prompt": "b"}], "test.jsonl")
    dataset = load_dataset(DataConfig(eval=(test,)), tokenizer, "eval", 0)
    assert [dataset[index].uid for index in range(len(dataset))] == ["test/eval/0"]


def test_seed_reaches_the_task(tokenizer):
    config = DataConfig(num_train_rows=20)
    first, same, other = (load_dataset(config, tokenizer, "train", seed) for seed in (0, 0, 1))
    assert questions(first) == questions(same)
    assert questions(first) != questions(other)


def test_custom_class(tokenizer, user_file):
    config = DataConfig(train=("anything at all",), dataset=f"{user_file}:Mine")
    dataset = load_dataset(config, tokenizer, "train", 3)
    assert len(dataset) == 2
    assert dataset[1].text == "['anything at all'] train 3"
    assert load_dataset(config, tokenizer, "eval", 3) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Empty", "has no rows"),
        ("Dicts", "row 0 is a dict; __getitem__ must return headwater.core.records.Prompt"),
        ("NoLength", "has no __len__"),
        ("OtherArguments", "it is constructed with the keyword arguments sources, config, tokenizer, split"),
        ("instance", "is a int; name a class"),
    ],
)
def test_bad_custom_class(tokenizer, user_file, name, message):
    with pytest.raises(DataError, match=f"data.dataset = '.*:{name}': .*{message}"):
        load_dataset(DataConfig(dataset=f"{user_file}:{name}"), tokenizer, "train", 0)


def test_missing_custom_class(tokenizer, user_file):
    with pytest.raises(UnknownName, match="has no 'Mime'; did you mean 'Mine'"):
        load_dataset(DataConfig(dataset=f"{user_file}:Mime"), tokenizer, "train", 0)


def test_rows_that_stand_for_others_may_be_unreadable(tokenizer):
    rows = [{"prompt": "a"}, {"prompt": 7}, {"prompt": "c"}, {"prompt": 8}]
    dataset = RLHFDataset([rows], DataConfig(truncation="left"), tokenizer)
    found = readable_prompts(dataset, range(4), skips_unreadable=True)
    assert [prompt.uid for prompt in found] == [dataset.uid(0), dataset.uid(2)]
    with pytest.raises(DataError, match="row 1"):
        list(readable_prompts(dataset, range(4), skips_unreadable=False))
    with pytest.raises(DataError, match="row 1"):
        list(readable_prompts(dataset, [1, 3], skips_unreadable=True))
