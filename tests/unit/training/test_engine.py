"""The training engine: log-probs, gradients, and what never changes them."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import TrainingConfig
from headwater.core.errors import DataError, RunError
from headwater.rollout.padding import pad_trajectories
from headwater.training.actor import Actor
from headwater.training.engine import LocalTrainEngine
from headwater.training.microbatch import plan_microbatches, trim

MODEL = tiny.model()


def experience(seed: int, rows: int = 12, zero_advantages: tuple[int, ...] = ()):
    trajectories = [tiny.trajectory(seed * 100 + row, uid=f"row{row // 4}") for row in range(rows)]
    data = pad_trajectories(trajectories, pad_token_id=0)
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(rows, 1, generator=generator) * data.batch["response_mask"]
    advantages[list(zero_advantages)] = 0.0
    return data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})


def engine(model=None, **settings) -> LocalTrainEngine:
    return LocalTrainEngine(
        model or copy.deepcopy(MODEL), TrainingConfig(learning_rate=1e-3, **settings), temperature=1.0
    )


def actor(train_engine: LocalTrainEngine, **settings) -> Actor:
    defaults = {"num_minibatches": 1, "num_epochs": 1, "skip_zero_advantages": False}
    return Actor(train_engine, ppo, **{**defaults, **settings})


def weights(train_engine: LocalTrainEngine) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in train_engine.export_weights()])


def gradient(data, max_tokens: int) -> torch.Tensor:
    """The gradient of one step, read off a plain SGD-like probe: loss scaled by the global token count."""
    train_engine = engine(max_tokens_per_microbatch=max_tokens)
    taken = {}

    def keep() -> dict[str, float]:
        taken["gradient"] = torch.cat([parameter.grad.flatten() for parameter in train_engine.model.parameters()])
        return {"skipped_steps": 0.0}

    train_engine._apply_gradient = keep
    actor(train_engine).update(data)
    return taken["gradient"]


def test_logprobs_match_one_plain_forward_pass_per_row():
    data = experience(1)
    padded = engine().logprobs(data)
    width = data.batch["response_mask"].shape[1]
    for row in range(len(data)):
        real = data.batch["attention_mask"][row].bool()
        tokens = data.batch["input_ids"][row][real]
        with torch.no_grad():
            logits = MODEL(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(-1, tokens[1:, None])[:, 0]
        num_response = int(real[-width:].sum())
        torch.testing.assert_close(padded[row, :num_response], expected[-num_response:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_tokens", [16, 24, 40, 100])
def test_gradient_does_not_depend_on_microbatches(max_tokens):
    data = experience(2)
    torch.testing.assert_close(gradient(data, max_tokens), gradient(data, 10_000), atol=1e-6, rtol=1e-4)


def test_skipping_zero_advantages_gives_the_same_update():
    data = experience(3, zero_advantages=(0, 1, 2, 3, 7))
    plain, skipping = engine(), engine()
    actor(plain).update(data)
    actor(skipping, skip_zero_advantages=True).update(data)
    torch.testing.assert_close(weights(skipping), weights(plain), atol=1e-5, rtol=1e-4)


def test_a_batch_that_teaches_nothing_changes_nothing():
    train_engine = engine()
    before = weights(train_engine)
    stats = actor(train_engine, skip_zero_advantages=True).update(experience(4, zero_advantages=tuple(range(12))))
    assert stats["optimizer_steps"] == 0
    assert torch.equal(weights(train_engine), before)


def test_minibatches_cover_the_batch_and_take_one_step_each():
    data = experience(5)
    learner = actor(engine(), num_minibatches=3, num_epochs=2)
    assert [len(part) for part in learner._minibatches(data)] == [4, 4, 4]
    assert learner.update(data)["optimizer_steps"] == 6


def test_training_raises_the_logprob_of_good_samples():
    data = experience(6)
    data = data.with_columns(tensors={"advantages": data.batch["response_mask"].clone()})
    train_engine = engine()
    before = (train_engine.logprobs(data) * data.batch["response_mask"]).sum()
    data = data.with_columns(tensors={"old_logprobs": train_engine.logprobs(data)})
    actor(train_engine, num_epochs=3).update(data)
    assert (train_engine.logprobs(data) * data.batch["response_mask"]).sum() > before


def test_masked_tokens_never_matter():
    data = experience(7)
    noisy = data.batch["advantages"] + 1e3 * (1 - data.batch["response_mask"])
    changed = data.with_columns(tensors={"advantages": noisy})
    torch.testing.assert_close(gradient(changed, 10_000), gradient(data, 10_000))


def test_a_gradient_that_is_not_finite_is_skipped_and_then_stops_the_run():
    train_engine = engine()
    before = weights(train_engine)

    def broken(logprobs, batch):
        return PolicyLoss(logprobs * float("nan"))

    for _ in range(2):
        stats = train_engine.train_step(experience(8), broken)
        assert stats["skipped_steps"] == 1
        assert "grad_norm" not in stats
    assert torch.equal(weights(train_engine), before)
    with pytest.raises(RunError, match=r"not finite 3 steps in a row; lower training\.learning_rate"):
        train_engine.train_step(experience(8), broken)


def test_warmup_raises_the_learning_rate():
    train_engine = engine(num_warmup_steps=3)
    rates = [actor(train_engine).update(experience(9))["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_save_and_load_continue_bitwise(tmp_path):
    straight = engine()
    for seed in (1, 2):
        actor(straight).update(experience(seed))
    first = engine()
    actor(first).update(experience(1))
    first.save(tmp_path)
    second = engine(copy.deepcopy(first.model))
    second.load(tmp_path)
    actor(second).update(experience(2))
    assert torch.equal(weights(second), weights(straight))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=40), st.integers(100, 400))
def test_microbatch_plans_cover_every_row_once_within_the_budget(lengths, budget):
    prompts, responses = [prompt for prompt, _ in lengths], [response for _, response in lengths]
    plan = plan_microbatches(prompts, responses, budget)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        width = max(prompts[row] for row in rows) + max(responses[row] for row in rows)
        assert len(rows) * width <= budget


@pytest.mark.parametrize("budget", [40, 60, 100])
def test_the_padded_batch_itself_keeps_the_budget(budget):
    widths = [
        micro.batch["input_ids"].numel()
        for _, micro in engine(max_tokens_per_microbatch=budget)._microbatches(experience(12))
    ]
    assert max(widths) <= budget


def test_a_row_over_the_budget_names_the_key():
    with pytest.raises(
        DataError, match=r"row 1 of the batch has 60 tokens, over training\.max_tokens_per_microbatch = 50"
    ):
        plan_microbatches([5, 30], [5, 30], 50)


def test_trim_drops_only_padding():
    data = experience(10)
    trimmed = trim(data[[0, 5]])
    for part, whole in zip(trimmed, data[[0, 5]], strict=True):
        keep = whole.tensors["attention_mask"].bool()
        tokens = part.tensors["input_ids"][part.tensors["attention_mask"].bool()]
        assert tokens.tolist() == whole.tensors["input_ids"][keep].tolist()
        assert part.tensors["response_mask"].sum() == whole.tensors["response_mask"].sum()
    assert trimmed.batch["attention_mask"].any(dim=0).all()


def test_no_trained_token_is_an_error():
    data = experience(11)
    data = data.with_columns(tensors={"response_mask": torch.zeros_like(data.batch["response_mask"])})
    with pytest.raises(RunError, match="no token of the batch is trained"):
        engine().train_step(data, lambda logprobs, batch: PolicyLoss(-logprobs))


def test_dropout_stays_off():
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5)
    train_engine = LocalTrainEngine(GPT2LMHeadModel(config), TrainingConfig(), temperature=1.0)
    data = experience(14)
    data = data.with_columns(tensors={"old_logprobs": train_engine.logprobs(data)})
    assert abs(actor(train_engine).update(data)["approx_kl"]) < 1e-6
