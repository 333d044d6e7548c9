"""What the training benchmark counts as work."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from headwater.config.schema import LoraConfig
from headwater.learner.lora import add_adapters
from headwater.rollout.group import pad_trajectories


@pytest.fixture
def train_step(script):
    return script("train_step")


def test_a_shared_prompt_is_computed_once_and_the_output_layer_on_trained_tokens(train_step):
    model = train_step.build_model("tiny", torch.device("cpu"), torch.float32)
    rows = [train_step.make_trajectory([11, 12, 13, 14], [20 + sample, 30, 40], sample) for sample in range(2)]
    data = pad_trajectories(rows, pad_token_id=0)
    work = train_step.Work.of(model, data)
    # Width 128, keys and values 64, between 384, four layers: q and o, k and v, gate and up and down.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384
    # Four tokens of the prompt and two of each response, whose last token predicts nothing; six are trained.
    products = 2 * 4 * layer * (4 + 2 * 2)
    head = 2 * 128 * 512 * 6
    attention = 4 * 128 * 4 * (4 * 5 / 2 + 2 * (2 * 4 + 2 * 3 / 2))
    assert work.tokens == 14
    assert work.forward_flops == products + head + attention
    assert work.train_flops == 3 * work.forward_flops
    add_adapters(model, LoraConfig(rank=1))
    adapters = 2 * 8 * sum(each.numel() for each in model.parameters() if each.requires_grad)
    work = train_step.Work.of(model, data)
    assert work.train_flops == 2 * (products + head) + 3 * (adapters + attention)


@pytest.mark.parametrize("samples", [1, 8])
def test_lengths_fit_however_many_samples_share_a_prompt(train_step, samples):
    options = Namespace(tokens=4096, mean=300, longest=1024, samples=samples)
    data = train_step.experience_of(options, vocabulary=512)
    assert len(data) % samples == 0
    assert int(data.batch["attention_mask"].sum()) >= 4096
    assert int(data.batch["response_mask"].sum(dim=1).min()) >= 8
