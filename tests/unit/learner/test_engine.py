"""The training engine: log-probs, gradients, and what never changes them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM, XLMConfig, XLMWithLMHeadModel

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, LearnerConfig
from headwater.core.errors import DataError, ModelError, RunError
from headwater.learner.actor import Actor
from headwater.learner.engine import ForwardEngine, TrainEngine, minibatches
from headwater.learner.export import merged_weights
from headwater.learner.optimizer import Optimizer
from headwater.learner.packed_module import PolicyModule
from headwater.learner.packing import PackRow, pack_rows
from headwater.rollout.group import pad_trajectories

MODEL = tiny.model()


def experience(seed: int, rows: int = 12, zero_advantages: tuple[int, ...] = ()):
    trajectories = [tiny.trajectory(seed * 100 + row, uid=f"row{row // 4}") for row in range(rows)]
    data = pad_trajectories(trajectories, pad_token_id=0)
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(rows, 1, generator=generator) * data.batch["response_mask"]
    advantages[list(zero_advantages)] = 0.0
    return data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})


def engine(model=None, **settings) -> TrainEngine:
    defaults = {"learning_rate": 1e-3, "skip_zero_advantages": False}
    return TrainEngine(
        PolicyModule(model or copy.deepcopy(MODEL), temperature=1.0), LearnerConfig(**{**defaults, **settings})
    )


def actor(train_engine: TrainEngine, **algorithm) -> Actor:
    return Actor(train_engine, ppo, AlgorithmConfig(**algorithm), loss_width=8)


def weights(train_engine: TrainEngine) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in merged_weights(train_engine.module.model)])


def gradient(data, max_tokens: int, **algorithm) -> torch.Tensor:
    """The gradient of one step, read off a plain SGD-like probe: loss scaled by the global token count."""
    train_engine = engine(max_tokens_per_microbatch=max_tokens)
    taken, clip = {}, train_engine.optimizer.clip

    def keep() -> torch.Tensor:
        taken["gradient"] = torch.cat([parameter.grad.flatten() for parameter in train_engine.module.parameters()])
        return clip()

    train_engine._optimizer.clip = keep
    actor(train_engine, **algorithm).update(data)
    return taken["gradient"]


def pass_sizes(train_engine: TrainEngine, monkeypatch) -> list[int]:
    sizes: list[int] = []
    packs = train_engine.packs

    def noted(*arguments):
        for pack, counts in packs(*arguments):
            sizes.append(len(pack.input_ids))
            yield pack, counts

    monkeypatch.setattr(train_engine, "packs", noted)
    return sizes


def test_passes_without_gradients_have_their_own_budget(monkeypatch):
    data = experience(1)
    longest = int(data.batch["attention_mask"].sum(dim=1).max())
    for given, budget in ((longest, longest), (0, 4 * 2 * longest)):
        trained = engine(max_tokens_per_microbatch=2 * longest, max_tokens_per_forward_pass=given)
        sizes = pass_sizes(trained, monkeypatch)
        computed = trained.compute(data)["logprobs"]
        assert budget / 4 < max(sizes) <= budget
        torch.testing.assert_close(computed, engine().compute(data)["logprobs"])
        sizes.clear()
        actor(trained).update(data)
        assert longest < max(sizes) <= 2 * longest
    # A row may be longer than one budget and fit the other.
    engine(max_tokens_per_microbatch=3, max_tokens_per_forward_pass=longest).compute(data)
    with pytest.raises(DataError, match=r"over learner\.max_tokens_per_microbatch = 3"):
        actor(engine(max_tokens_per_microbatch=3, max_tokens_per_forward_pass=longest)).update(data)
    with pytest.raises(DataError, match=r"over learner\.max_tokens_per_forward_pass = 3"):
        engine(max_tokens_per_forward_pass=3).compute(data)


def test_logprobs_match_one_plain_forward_pass_per_row():
    data = experience(1)
    padded = actor(engine()).engine.compute(data)["logprobs"]
    width = data.batch["response_mask"].shape[1]
    for row in range(len(data)):
        real = data.batch["attention_mask"][row].bool()
        tokens = data.batch["input_ids"][row][real]
        with torch.no_grad():
            logits = MODEL(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(-1, tokens[1:, None])[:, 0]
        num_response = int(real[-width:].sum())
        trained = data.batch["response_mask"][row, :num_response]
        torch.testing.assert_close(padded[row, :num_response], expected[-num_response:] * trained, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_tokens", [16, 24, 40, 100])
def test_gradient_does_not_depend_on_microbatches(max_tokens):
    data = experience(2)
    torch.testing.assert_close(gradient(data, max_tokens), gradient(data, 10_000), atol=1e-6, rtol=1e-4)


def test_skipping_zero_advantages_gives_the_same_update():
    data = experience(3, zero_advantages=(0, 1, 2, 3, 7))
    plain, skipping = engine(), engine(skip_zero_advantages=True)
    actor(plain).update(data)
    actor(skipping).update(data)
    torch.testing.assert_close(weights(skipping), weights(plain), atol=1e-5, rtol=1e-4)


def test_a_batch_that_teaches_nothing_changes_nothing():
    train_engine = engine(skip_zero_advantages=True)
    before = weights(train_engine)
    stats = actor(train_engine).update(experience(4, zero_advantages=tuple(range(12))))
    assert stats["optimizer_steps"] == 0
    assert torch.equal(weights(train_engine), before)


def test_minibatches_cover_the_batch_and_take_one_step_each():
    data = experience(5)
    train_engine = engine(num_minibatches=3, num_epochs=2)
    assert [len(part) for part in minibatches(data, train_engine.config)] == [4, 4, 4] * 2
    assert actor(train_engine).update(data)["optimizer_steps"] == 6


def test_training_raises_the_logprob_of_good_samples():
    data = experience(6)
    data = data.with_columns(tensors={"advantages": data.batch["response_mask"].clone()})
    learner = actor(engine(num_epochs=3))
    before = learner.engine.compute(data)["logprobs"].sum()
    learner.update(data.with_columns(tensors={"old_logprobs": learner.engine.compute(data)["logprobs"]}))
    assert learner.engine.compute(data)["logprobs"].sum() > before


def test_masked_tokens_never_matter():
    data = experience(7)
    noisy = data.batch["advantages"] + 1e3 * (1 - data.batch["response_mask"])
    changed = data.with_columns(tensors={"advantages": noisy})
    torch.testing.assert_close(gradient(changed, 10_000), gradient(data, 10_000))


def test_a_gradient_that_is_not_finite_is_skipped_and_then_stops_the_run():
    train_engine = engine()
    before = weights(train_engine)

    def broken(outputs, batch):
        return PolicyLoss(outputs["logprobs"] * float("nan"))

    for _ in range(2):
        stats = train_engine.train_step(experience(8), broken)
        assert stats["skipped_steps"] == 1
        assert "grad_norm" not in stats
    assert torch.equal(weights(train_engine), before)
    with pytest.raises(
        RunError, match=r"not finite in 3 steps in a row \(learner\.max_bad_steps\); lower learner\.learning"
    ):
        train_engine.train_step(experience(8), broken)


def test_warmup_raises_the_learning_rate():
    train_engine = engine(num_warmup_steps=3)
    rates = [actor(train_engine).update(experience(9))["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rate_that_falls_must_be_told_over_how_many_steps(schedule):
    with pytest.raises(ValueError, match=f"num_decay_steps = 0: learner.schedule = {schedule} .* pass the number"):
        engine(schedule=schedule)


def test_a_sibling_s_averages_leave_the_device_with_the_learner_s(monkeypatch):
    train_engine = engine()
    sibling = train_engine.sibling(train_engine.config)
    moved: list[Optimizer] = []
    monkeypatch.setattr(Optimizer, "move", lambda optimizer, device: moved.append(optimizer))
    train_engine.offload()
    assert set(moved) == {train_engine._optimizer, sibling._optimizer}
    moved.clear()
    del sibling  # nothing keeps what has served
    train_engine.onload()
    assert moved == [train_engine._optimizer]


def test_save_and_load_continue_bitwise(tmp_path):
    straight = engine()
    for seed in (1, 2):
        actor(straight).update(experience(seed))
    first = engine()
    actor(first).update(experience(1))
    first.save(tmp_path)
    second = engine(copy.deepcopy(first.module.model))
    second.load(tmp_path)
    actor(second).update(experience(2))
    assert torch.equal(weights(second), weights(straight))


def test_no_trained_token_is_an_error():
    data = experience(11)
    data = data.with_columns(tensors={"response_mask": torch.zeros_like(data.batch["response_mask"])})
    with pytest.raises(RunError, match="no token of the batch is trained"):
        engine().train_step(data, lambda outputs, batch: PolicyLoss(-outputs["logprobs"]))


def test_dropout_stays_off():
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        train_engine = engine(LlamaForCausalLM(config))
    data = experience(14)
    data = data.with_columns(tensors={"old_logprobs": actor(train_engine).engine.compute(data)["logprobs"]})
    assert abs(actor(train_engine).update(data)["approx_kl"]) < 1e-6


def test_a_model_that_takes_no_attention_function_is_refused():
    model = XLMWithLMHeadModel(XLMConfig(vocab_size=512, emb_dim=32, n_layers=1, n_heads=2))
    with pytest.raises(ModelError, match="xlm: its layers do not accept an attention function"):
        PolicyModule(model, 1.0)


class BesideAnother:
    """This rank beside one that needs so many packs."""

    count = 2

    def __init__(self, num_packs: int) -> None:
        self._num_packs = num_packs

    def max(self, value: int) -> int:
        return max(value, self._num_packs)


def test_no_row_is_left_out_when_another_rank_needs_more_packs():
    rng = np.random.default_rng(0)
    tokens = np.zeros(1, np.int64)
    rows = [
        PackRow(index, prompt=np.full(int(size), index), response=tokens[:0], columns=tokens, targets=tokens)
        for index, size in enumerate(rng.integers(300, 361, 190))
    ]
    # Even packs are fewer than those of first fit; a few more of them, and it is first fit that is used.
    most = len(pack_rows(rows, 1, 1000)) + 2
    assert len(pack_rows(rows, 1, 1000, min_packs=most)) > most
    engine = ForwardEngine.__new__(ForwardEngine)
    engine.config, engine.device = LearnerConfig(), torch.device("cpu")
    engine.ranks = BesideAnother(most)
    made = engine.packs(rows, 1, 1000)
    assert sorted(row for pack, counts in made if counts for row in pack.rows) == list(range(190))


@pytest.mark.parametrize("max_tokens", [24, 1000])
def test_copies_of_a_row_that_share_its_weight_are_one_row_in_a_mean_over_sequences(max_tokens):
    whole = experience(3, rows=4)
    copied = whole[[0, 1, 1, 1, 2, 3]]
    shared = copied.with_columns(tensors={"sequence_weights": torch.tensor([1.0, *[1 / 3] * 3, 1.0, 1.0])})
    expected, made, unweighted = (
        gradient(data, max_tokens, aggregation="seq-mean-token-mean") for data in (whole, shared, copied)
    )
    torch.testing.assert_close(made, expected, atol=1e-7, rtol=1e-4)
    assert (unweighted - expected).abs().max() > 1e-4
