"""The real small model: fetched once into the normal cache, then used as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, headwater, metrics

from headwater.models.builtin.smollm2 import fetch_smollm2
from headwater.models.load import end_token_ids, load_model, load_processor, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

CHAT = [{"role": "user", "content": "What is 7 + 5?"}]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    fetch_smollm2()
    return load_model("smollm2", dtype="float32", device="cpu", seed=0), load_tokenizer("smollm2")


def test_it_answers_and_stops(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    assert "12" in tokenizer.decode(output, skip_special_tokens=True)
    assert tokenizer.decode(output[-1:]) == "<|im_end|>"
    assert len(output) < 64


def test_left_padding_does_not_change_the_answer(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    longer = [{"role": "user", "content": "What is 7 + 5? Answer with one short sentence, please."}]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in (CHAT, longer)]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch["input_ids"][0, 0] == tokenizer.pad_token_id
    alone = tokenizer(texts[:1], return_tensors="pt")
    answers = [model.generate(**inputs, max_new_tokens=32, do_sample=False)[0] for inputs in (batch, alone)]
    width = min(
        answer.shape[0] - inputs["input_ids"].shape[1] for answer, inputs in zip(answers, (batch, alone), strict=True)
    )
    starts = [inputs["input_ids"].shape[1] for inputs in (batch, alone)]
    generated = [answer[start : start + width] for answer, start in zip(answers, starts, strict=True)]
    assert torch.equal(*generated)


def test_special_tokens_and_template(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.pad_token_id == model.generation_config.pad_token_id == 0
    assert end_token_ids(model, tokenizer) == (2,)
    assert load_processor("smollm2") is None
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"
    )
    answered = [*CHAT, {"role": "assistant", "content": "12"}]
    encoded = tokenizer.apply_chat_template(answered, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, mask in pairs if mask]) == "12<|im_end|>"


def test_text_survives_and_digits_stand_alone(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    text = " x =  12345;\n\n é 漢字 don 't ."
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12345")] == list("12345")


def test_the_gsm8k_recipe_trains(tmp_path: Path) -> None:
    fetch_smollm2()
    excerpt = ROOT / "tests" / "unit" / "data" / "gsm8k"
    result = headwater(
        "train", "gsm8k", f"run.root={tmp_path}", f"data.task_args.folder={excerpt}",
        "data.num_train_rows=8", "data.num_eval_rows=2", "eval.num_prompts=2", "eval.every_steps=0",
        "trainer.checkpoint_every_steps=0", "trainer.total_steps=1", "trainer.num_prompts_per_step=2",
        "rollout.num_samples_per_prompt=2", "rollout.max_new_tokens=24",
        "reward.function=tests/integration/varied_reward.py:compute_score",
    )  # fmt: skip
    assert result.code == 0, result.stderr
    assert metrics(tmp_path / "gsm8k", "train")[0]["actor/optimizer_steps"] == 1
