"""A reward model's score joins the reward, with its weight."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch.testing import assert_close
from trainer.experience_parts import batch, scores, training
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from headwater.core.errors import DataError, ModelError


def save_judge(folder, num_labels: int = 1):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=num_labels,
        pad_token_id=tiny.tokenizer().pad_token_id,
    )
    judge = Qwen2ForSequenceClassification(config).eval()
    judge.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return judge


def test_the_score_of_the_whole_conversation_is_added_with_its_weight(tmp_path):
    judge = save_judge(tmp_path)
    rollouts = batch(info={"response_text": "7"})
    expected = []
    for group in rollouts.groups:
        conversation = [*group.prompt.messages, {"role": "assistant", "content": "7"}]
        tokens = tiny.tokenizer().apply_chat_template(conversation, tokenize=True, return_dict=False)
        with torch.no_grad():
            score = judge(torch.tensor([tokens])).logits[0, 0]
        expected += [score] * len(group.trajectories)
    judged = torch.stack(expected)
    assert judged.unique().numel() == len(rollouts.groups)
    parts = training(f"reward.model={tmp_path}", "reward.model_weight=0.5")
    made = parts.experience.make(rollouts, version=0)
    assert_close(made.data.batch["rewards"].sum(dim=1), scores(rollouts) + 0.5 * judged, atol=1e-5, rtol=1e-5)
    assert made.metrics["reward_model/mean"] == pytest.approx(float(judged.mean()), abs=1e-5)


def test_the_score_is_of_what_was_said_in_all_turns(tmp_path):
    judge = save_judge(tmp_path)
    said = [
        {"role": "user", "content": "A summary."},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "7"},
    ]
    rollouts = batch(num_groups=1, num_samples=2, messages=tuple(said), info={"response_text": "7"})
    tokens = tiny.tokenizer().apply_chat_template(said, tokenize=True, return_dict=False)
    with torch.no_grad():
        judged = judge(torch.tensor([tokens])).logits[0, 0]
    made = training(f"reward.model={tmp_path}").experience.make(rollouts, version=0)
    assert_close(made.data.batch["rewards"].sum(dim=1), scores(rollouts) + judged, atol=1e-5, rtol=1e-5)


def test_a_workflow_that_gives_no_text_is_told_so(tmp_path):
    save_judge(tmp_path)
    with pytest.raises(
        DataError, match=r"row row0: reward\.model scores responses as text.*as messages, or .* info\['response_text'\]"
    ):
        training(f"reward.model={tmp_path}").experience.make(batch(), version=0)


def test_a_judge_with_several_labels_is_refused(tmp_path):
    save_judge(tmp_path, num_labels=3)
    with pytest.raises(ModelError, match=r"reward\.model = .*: must have one output"):
        training(f"reward.model={tmp_path}")


def test_a_language_model_is_no_judge():
    with pytest.raises(ModelError, match=r"reward\.model = tiny:qwen3: not a classifier"):
        training("reward.model=tiny:qwen3")


def test_a_judge_without_a_chat_template_says_what_to_do(tmp_path):
    save_judge(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"reward\.model: its tokenizer has no chat template.*chat_template\.jinja"):
        training(f"reward.model={tmp_path}")
