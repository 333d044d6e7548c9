from __future__ import annotations

import json
import pickle

import datasets
import pytest

from headwater.chat.render import encode_plain
from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.data.rlhf_dataset import RLHFDataset

CHAT = [{"role": "user", "content": "Hi"}]


def only(tokenizer, source, **settings):
    dataset = RLHFDataset([source], DataConfig(**settings), tokenizer)
    assert len(dataset) == 1
    return dataset[0]


def test_verl_row(tokenizer, write_parquet):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 4, "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "72"}}}},
    }
    prompt = only(tokenizer, write_parquet([row], "train.parquet"))
    assert prompt.uid == "train/train/0"
    assert prompt.messages == tuple(CHAT)
    assert prompt.text == "[user]Hi<|end|>[assistant]"
    assert prompt.tokens == tuple(tokenizer.encode(prompt.text, add_special_tokens=False))
    assert prompt.tokens.count(tokenizer.eos_token_id) == 1
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.ground_truth == "72"
    assert prompt.extra_info["index"] == 4
    assert prompt.tools_kwargs == {"calc": {"create_kwargs": {"ground_truth": "72"}}}
    assert prompt.media == ()


def test_all_kinds_of_source_give_the_same_prompts(tokenizer, tmp_path, write_jsonl, write_parquet):
    rows = [{"prompt": CHAT, "ground_truth": str(number), "data_source": "mine"} for number in range(3)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    sources = [
        write_parquet(rows),
        write_jsonl(rows),
        str(tmp_path / "rows.json"),
        datasets.Dataset.from_list(rows),
        rows,
    ]
    dataset = RLHFDataset(sources, DataConfig(), tokenizer, split="eval")
    seen = [dataset[index] for index in range(len(dataset))]
    assert [prompt.ground_truth for prompt in seen] == ["0", "1", "2"] * 5
    assert {prompt.text for prompt in seen} == {"[user]Hi<|end|>[assistant]"}
    names = ["rows", "rows#2", "rows#3", "dataset", "dataset#2"]
    assert [prompt.uid for prompt in seen] == [f"{name}/eval/{row}" for name in names for row in range(3)]


def test_plain_string_and_other_columns(tokenizer, write_jsonl):
    path = write_jsonl([{"question": "Hi", "ground_truth": {"target": 3}, "tools_kwargs": {"t": {"x": 1}}}], "a.jsonl")
    prompt = only(tokenizer, path, prompt_key="question")
    assert prompt.messages == tuple(CHAT)
    assert prompt.data_source == "a"
    assert prompt.ground_truth == {"target": 3}
    assert prompt.tools_kwargs == {"t": {"x": 1}}


def test_keys_that_parquet_filled_with_none_are_dropped(tokenizer, write_parquet):
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4"},
    ]
    rows = [{"prompt": chat, "tools_kwargs": {"a": {"x": 1}}}, {"prompt": CHAT, "tools_kwargs": {"b": {"y": 2}}}]
    dataset = RLHFDataset([write_parquet(rows)], DataConfig(truncation="left"), tokenizer)
    second = dataset[1]
    assert second.messages == tuple(CHAT)
    assert second.tools_kwargs == {"b": {"y": 2}}


def test_system_prompt_only_where_there_is_none(tokenizer, write_jsonl):
    own = [{"role": "system", "content": "Mine"}, *CHAT]
    dataset = RLHFDataset(
        [write_jsonl([{"prompt": CHAT}, {"prompt": own}, {"prompt": "Hi"}])],
        DataConfig(system_prompt="Be brief"),
        tokenizer,
    )
    assert [dataset[index].text for index in range(3)] == [
        "[system]Be brief<|end|>[user]Hi<|end|>[assistant]",
        "[system]Mine<|end|>[user]Hi<|end|>[assistant]",
        "[system]Be brief<|end|>[user]Hi<|end|>[assistant]",
    ]


def test_chat_template_arguments(tokenizer, write_jsonl):
    path = write_jsonl([{"prompt": CHAT}])
    assert only(tokenizer, path, chat_template_args={"shout": True}).text == "[user]Hi<|end|>![assistant]"
    with pytest.raises(DataError, match=r"data.chat_template_args.tokenize: is fixed"):
        only(tokenizer, path, chat_template_args={"tokenize": True})


def test_tasks_and_files_together(tokenizer, write_jsonl):
    sources = ["arithmetic", write_jsonl([{"prompt": "Hi"}])]
    dataset = RLHFDataset(sources, DataConfig(train=tuple(sources), num_train_rows=10), tokenizer, seed=2)
    assert len(dataset) == 11
    assert dataset[3].uid == "arithmetic/train/3"
    assert dataset[3].extra_info["demonstration"] == dataset[3].ground_truth
    assert dataset[10].uid == "rows/train/0"
    assert dataset[-1] == dataset[10]
    assert list(dataset) == [dataset[index] for index in range(11)]
    with pytest.raises(IndexError):
        dataset[11]


def test_number_of_task_rows(tokenizer):
    config = DataConfig(num_train_rows=5, num_eval_rows=4)
    assert len(RLHFDataset(["arithmetic"], config, tokenizer)) == 5
    assert len(RLHFDataset(["arithmetic"], config, tokenizer, split="eval")) == 4
    assert len(RLHFDataset(["arithmetic"], config, tokenizer, num_rows=3)) == 3


def test_same_arguments_same_prompts_and_survives_pickle(tokenizer, write_parquet):
    sources = ["countdown", write_parquet([{"prompt": CHAT}] * 3)]
    first, second = (RLHFDataset(sources, DataConfig(num_train_rows=5), tokenizer, seed=4) for _ in range(2))
    assert list(first) == list(second) == list(pickle.loads(pickle.dumps(first)))


BAD_ROWS = [
    ({"question": "Hi"}, r"no 'prompt'; the row has question; set data.prompt_key"),
    ({"prompt": None}, r"no 'prompt'"),
    ({"prompt": 3}, r"prompt is a int; must be a list of messages or a string"),
    ({"prompt": {"role": "user"}}, r"prompt is a dict; must be a list of messages"),
    ({"prompt": []}, r"prompt is empty"),
    ({"prompt": "  "}, r"prompt is empty"),
    ({"prompt": ["Hi"]}, r"prompt\[0\] is a str; must be a message"),
    ({"prompt": [*CHAT, {"content": "a"}]}, r"prompt\[1\].role = None; must be 'system'"),
    ({"prompt": [{"role": "user"}]}, r"prompt\[0\].content is missing"),
    ({"prompt": [{"role": "user", "content": 3}]}, r"prompt\[0\].content is a int"),
    ({"prompt": [{"role": "user", "content": ["a"]}]}, r"prompt\[0\].content\[0\] = 'a'; must be a part"),
    ({"prompt": CHAT, "extra_info": "x"}, r"extra_info is a str; must be an object"),
    ({"prompt": CHAT, "extra_info": {"tools_kwargs": 1}}, r"extra_info: tools_kwargs is a int"),
    ({"prompt": CHAT, "reward_model": "7"}, r"reward_model is a str; must be an object"),
    ({"prompt": CHAT, "data_source": 7}, r"data_source = 7; must be the name of a scorer"),
]


def test_bad_rows_are_named_at_construction(tokenizer, write_jsonl):
    for row, message in BAD_ROWS:
        path = write_jsonl([{"prompt": "fine"}, row])
        with pytest.raises(DataError, match=r"rows.jsonl, line 2: " + message):
            RLHFDataset([path], DataConfig(), tokenizer)


def test_without_a_chat_template_only_plain_text_is_a_prompt(tokenizer_without_template, write_jsonl):
    rows = write_jsonl([{"prompt": "Hi there", "ground_truth": "1"}])
    (prompt,) = RLHFDataset([rows], DataConfig(), tokenizer_without_template)
    assert prompt.text == "Hi there"
    assert prompt.tokens == tuple(tokenizer_without_template.encode("Hi there", add_special_tokens=False))
    assert prompt.messages == ({"role": "user", "content": "Hi there"},)
    for setting in ({"system_prompt": "Be brief."}, {"chat_template_args": {"shout": True}}):
        with pytest.raises(
            DataError, match=rf"data.{next(iter(setting))} needs a chat template, and the model has none"
        ):
            RLHFDataset([rows], DataConfig(**setting), tokenizer_without_template)
    with pytest.raises(
        DataError, match=r"is a list of messages, and the model has no chat template; set model\.chat_t"
    ):
        RLHFDataset([write_jsonl([{"prompt": CHAT}])], DataConfig(), tokenizer_without_template)


def test_plain_text_begins_as_the_model_expects_and_does_not_end(tokenizer_without_template):
    from copy import deepcopy

    from tokenizers.processors import TemplateProcessing

    both = deepcopy(tokenizer_without_template)
    marks = [("<|pad|>", both.pad_token_id), ("<|end|>", both.eos_token_id)]
    both.backend_tokenizer.post_processor = TemplateProcessing(single="<|pad|> $A <|end|>", special_tokens=marks)
    assert both.encode("Hi")[-1] == both.eos_token_id
    assert encode_plain(both, "Hi") == (both.pad_token_id, *tokenizer_without_template.encode("Hi"))
    written = tuple(tokenizer_without_template.encode("Hi<|end|>"))
    assert encode_plain(tokenizer_without_template, "Hi<|end|>") == written


def test_chat_template_that_refuses_the_chat(tokenizer, write_jsonl):
    from copy import deepcopy

    strict = deepcopy(tokenizer)
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    with pytest.raises(DataError, match=r"line 1: the chat template refuses prompt .*no system role"):
        RLHFDataset([write_jsonl([{"prompt": "Hi"}])], DataConfig(system_prompt="S"), strict)
    strict.chat_template = "{{ '' }}"
    with pytest.raises(DataError, match="line 1: the chat template renders prompt to no tokens"):
        RLHFDataset([write_jsonl([{"prompt": "Hi"}])], DataConfig(), strict)


def test_sources_must_be_a_list_of_some(tokenizer):
    with pytest.raises(DataError, match="no data sources"):
        RLHFDataset([], DataConfig(), tokenizer)
    with pytest.raises(DataError, match=r"must be a list; write \['arithmetic'\]"):
        RLHFDataset("arithmetic", DataConfig(), tokenizer)


def test_task_arguments_without_a_task_are_refused(tokenizer, write_jsonl):
    path = write_jsonl([{"prompt": "Hi"}])
    config = DataConfig(train=(path,), task_args={"max_operand": 3})
    with pytest.raises(DataError, match=r"data.task_args = \{'max_operand': 3\}: no data source is a task"):
        RLHFDataset([path], config, tokenizer)


def test_a_misspelled_task_with_arguments_is_named(tokenizer):
    config = DataConfig(train=("arithmetc",), task_args={"max_operand": 3})
    with pytest.raises(DataError, match=r"data source 'arithmetc': .* did you mean 'arithmetic'"):
        RLHFDataset(["arithmetc"], config, tokenizer)
