"""Actor, adapters, critic, reference and reward model on a tiny model."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from learner.test_engine import actor, engine, experience
from transformers import Qwen3ForSequenceClassification

from headwater.algorithms.policy_losses.decoupled import decoupled
from headwater.config.schema import AlgorithmConfig, Config, CriticConfig, LearnerConfig, LoraConfig
from headwater.core.errors import ConfigError, DataError, MissingColumn, ModelError, RunError
from headwater.learner import sharded_checkpoint
from headwater.learner.actor import Actor
from headwater.learner.critic import Critic
from headwater.learner.engine import ForwardEngine, TrainEngine
from headwater.learner.export import merged_weights
from headwater.learner.learner import LocalLearner
from headwater.learner.lora import add_adapters, without_adapters
from headwater.learner.packed_module import PolicyModule, ValueModule
from headwater.learner.reward_model import RewardModel
from headwater.models.scored import load_critic, load_reward_model


def without(data, *columns):
    return data.select(sorted(set(data.batch.keys()) - set(columns)))


@pytest.mark.parametrize("skips", [False, True])
def test_advantages_that_are_missing_are_named(skips):
    learner = actor(engine(skip_zero_advantages=skips))
    with pytest.raises(MissingColumn, match=r"policy_loss = ppo needs the column 'advantages'.*algorithm\.advantage"):
        learner.update(without(experience(1), "advantages"))


def test_old_logprobs_that_are_missing_are_named():
    with pytest.raises(MissingColumn, match=r"policy_loss = ppo needs the column 'old_logprobs'.*old_logprobs"):
        actor(engine()).update(without(experience(1), "old_logprobs"))


@pytest.mark.parametrize("column", ["response_mask", "input_ids", "attention_mask"])
def test_a_column_that_every_pass_needs_is_named(column):
    with pytest.raises(MissingColumn, match=f"needs the column '{column}'.*pad_trajectories"):
        actor(engine()).update(without(experience(1), column))


def test_a_reference_that_is_missing_is_named():
    with pytest.raises(MissingColumn, match=r"kl_in_loss = 0\.1 needs the column 'reference_logprobs'.*kl_in_loss=0"):
        actor(engine(), kl_in_loss=0.1).update(experience(1))


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("rollout_logprobs", "the column 'rollout_logprobs'"),
        ("versions", "the column 'versions'"),
        ("", "the policy's"),
    ],
)
def test_what_loglinear_misses_is_named(missing, named):
    data = without(experience(1), missing)
    data = data.with_columns(meta_info={"version": 1}) if missing else data
    with pytest.raises(MissingColumn, match=f"old_logprobs = loglinear needs {named}.* gives it"):
        actor(engine(), old_logprobs="loglinear").update(data)


def test_only_a_loss_that_reads_the_rollout_s_logprobs_needs_them():
    data = without(experience(1), "rollout_logprobs")
    assert actor(engine()).update(data)["optimizer_steps"] == 1
    learner = Actor(engine(), decoupled, AlgorithmConfig(policy_loss="decoupled"), loss_width=8)
    with pytest.raises(MissingColumn, match="decoupled needs the column 'rollout_logprobs'"):
        learner.update(data)


def adapted_engine(rank: int = 4, **settings) -> TrainEngine:
    model = tiny.model()
    module = PolicyModule(model, 1.0)
    torch.manual_seed(0)
    add_adapters(model, LoraConfig(rank=rank, **settings))
    return TrainEngine(module, LearnerConfig(learning_rate=1e-2, skip_zero_advantages=False))


def trained(engine: TrainEngine, seed: int = 1) -> TrainEngine:
    actor(engine).update(experience(seed))
    return engine


def test_adapters_start_as_no_change_and_then_learn():
    train_engine, data = adapted_engine(), experience(1)
    start = actor(engine()).engine.compute(data)["logprobs"]
    torch.testing.assert_close(actor(train_engine).engine.compute(data)["logprobs"], start)
    trained(train_engine)
    assert not torch.allclose(actor(train_engine).engine.compute(data)["logprobs"], start)


def test_only_adapters_are_trained():
    train_engine = adapted_engine()
    frozen = {
        name: parameter.clone()
        for name, parameter in train_engine.module.named_parameters()
        if not parameter.requires_grad
    }
    trained(train_engine)
    assert all(torch.equal(dict(train_engine.module.named_parameters())[name], each) for name, each in frozen.items())
    names = [name for name, parameter in train_engine.module.named_parameters() if parameter.requires_grad]
    assert names
    assert all("lora_" in name for name in names)


def test_exported_weights_are_those_of_a_plain_model_that_does_the_same():
    train_engine, data = trained(adapted_engine()), experience(2)
    plain = tiny.model()
    merged = dict(merged_weights(train_engine.module.model))
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(
        actor(engine(plain)).engine.compute(data)["logprobs"],
        actor(train_engine).engine.compute(data)["logprobs"],
        atol=1e-4,
        rtol=1e-4,
    )


def test_the_reference_is_the_model_without_its_adapters():
    train_engine, data = trained(adapted_engine()), experience(3)
    learner = LocalLearner(Config(), actor(train_engine), tiny.tokenizer(), reference=train_engine)
    reference = learner.compute(data, ["reference_logprobs"])["reference_logprobs"]
    torch.testing.assert_close(reference, actor(engine()).engine.compute(data)["logprobs"])
    changed = actor(train_engine).engine.compute(data)["logprobs"]
    assert not torch.allclose(reference, changed)
    torch.testing.assert_close(actor(train_engine).engine.compute(data)["logprobs"], changed)  # and they are back


def test_adapters_come_back_after_an_error():
    train_engine = trained(adapted_engine())
    expected = actor(train_engine).engine.compute(experience(3))["logprobs"]
    with pytest.raises(RuntimeError), without_adapters(train_engine.module):
        raise RuntimeError
    torch.testing.assert_close(actor(train_engine).engine.compute(experience(3))["logprobs"], expected)


def assert_same_weights(ours, theirs):
    for (name, tensor), (_, other) in zip(ours, theirs, strict=True):
        assert torch.equal(tensor, other), name


def test_adapters_are_saved_and_loaded(tmp_path):
    first = trained(adapted_engine())
    first.save(tmp_path)
    second = adapted_engine()
    second.load(tmp_path)
    assert_same_weights(merged_weights(first.module.model), merged_weights(second.module.model))
    trained(first, 2)
    trained(second, 2)
    assert_same_weights(merged_weights(first.module.model), merged_weights(second.module.model))


def test_adapters_of_another_scale_are_refused_before_anything_is_read(tmp_path):
    trained(adapted_engine(alpha=16)).save(tmp_path)
    other = adapted_engine(alpha=32)
    before = list(merged_weights(other.module.model))
    with pytest.raises(
        RunError, match=r"saved with lora\.alpha = 16, but this run has 32.*; resume with lora\.alpha=16"
    ):
        other.load(tmp_path)
    assert_same_weights(merged_weights(other.module.model), before)


def test_adapters_saved_without_their_scale_still_load(tmp_path, monkeypatch):
    """As checkpoints were before they had it."""
    with monkeypatch.context() as earlier:
        earlier.setattr(sharded_checkpoint, "adapter_alpha", lambda model: None)
        first = trained(adapted_engine())
        first.save(tmp_path)
    second = adapted_engine()
    second.load(tmp_path)
    assert_same_weights(merged_weights(first.module.model), merged_weights(second.module.model))


def test_an_unknown_target_is_an_error():
    with pytest.raises(ConfigError, match=r"lora\.targets = \['nothing'\]"):
        adapted_engine(targets=("nothing",))


def test_a_frozen_reference_stays_where_the_policy_was():
    policy, data = engine(), experience(4)
    learner = LocalLearner(Config(), actor(policy), tiny.tokenizer(), reference=engine())
    before = learner.compute(data, ["logprobs", "reference_logprobs"])
    trained(policy)
    after = learner.compute(data, ["logprobs", "reference_logprobs"])
    torch.testing.assert_close(after["reference_logprobs"], before["reference_logprobs"])
    assert not torch.allclose(after["logprobs"], before["logprobs"])


def critic(**settings) -> Critic:
    model = load_critic("tiny:qwen3", dtype="float32", device="cpu", seed=0)
    training = LearnerConfig(learning_rate=3e-3, num_epochs=20)
    return Critic(TrainEngine(ValueModule(model), training), CriticConfig(**settings), AlgorithmConfig(), loss_width=8)


def test_a_critic_starts_at_zero_and_learns_the_returns():
    data, judge = experience(5), critic(clip=100.0)
    mask = data.batch["response_mask"]
    values = judge.values(data)
    assert not values.any()
    returns = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    stats = judge.update(data.with_columns(tensors={"values": values, "returns": returns}))
    error = ((judge.values(data) - returns).square() * mask).sum() / mask.sum()
    assert error < 0.3 * (returns.square() * mask).sum() / mask.sum()
    assert {"loss", "value", "clip_fraction", "grad_norm"} <= stats.keys()


@pytest.mark.parametrize("missing", ["values", "returns"])
def test_what_the_critic_misses_is_named(missing):
    data = experience(5)
    columns = {name: data.batch["response_mask"] for name in ("values", "returns") if name != missing}
    with pytest.raises(MissingColumn, match=f"critic.enabled = true needs the column '{missing}'.* gives it"):
        critic().update(data.with_columns(tensors=columns))


def test_values_are_those_before_each_token():
    """The value of a token does not depend on that token, only on what came before."""
    data, judge = experience(6), critic()
    torch.nn.init.normal_(judge.engine.module.model.score.weight)
    before = judge.values(data)
    row = int((data.batch["response_mask"].sum(dim=1) > 1).nonzero()[0])
    last = int(data.batch["response_mask"][row].nonzero()[-1])
    tokens = data.batch["input_ids"].clone()
    tokens[row, tokens.shape[1] - data.batch["response_mask"].shape[1] + last] = 77
    after = judge.values(data.with_columns(tensors={"input_ids": tokens}))
    torch.testing.assert_close(after, before)
    assert before[row].any()


def classifier_folder(tmp_path, **fields):
    config = copy.deepcopy(tiny.model().config)
    for name, value in {"num_labels": 1, **fields}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(config)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return model


def reward_model(folder, max_tokens: int) -> RewardModel:
    module = ValueModule(load_reward_model(str(folder), dtype="float32", device="cpu"))
    return RewardModel(ForwardEngine(module, LearnerConfig(max_tokens_per_forward_pass=max_tokens)), tiny.tokenizer())


CONVERSATIONS = [
    [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": answer}]
    for answer in ("2", "three", "a rather long answer to a short question")
]


def test_a_reward_model_scores_conversations_as_transformers_does(tmp_path):
    model = classifier_folder(tmp_path).eval()
    judge = reward_model(tmp_path, max_tokens=64)
    scores = judge.scores(CONVERSATIONS)
    for conversation, score in zip(CONVERSATIONS, scores, strict=True):
        tokens = tiny.tokenizer().apply_chat_template(conversation, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            # All labels are scored at the last token that is no padding.
            expected = model(tokens, attention_mask=torch.ones_like(tokens)).logits[0, 0]
        torch.testing.assert_close(score, expected, atol=1e-4, rtol=1e-4)


def test_a_conversation_over_the_budget_is_named_with_its_judge(tmp_path):
    """The first two are the same, and so one bundle: it is not bundles that are counted."""
    classifier_folder(tmp_path)
    longest = len(tiny.tokenizer().apply_chat_template(CONVERSATIONS[2], tokenize=True, return_dict=False))
    judge = reward_model(tmp_path, max_tokens=longest - 1)
    named = (
        f"reward.model: conversation 2 of the batch has {longest} of its tokens, over learner.max_tokens_per_forward"
    )
    with pytest.raises(DataError, match=rf"{named}_pass = {longest - 1}; raise that to {longest}"):
        judge.scores([CONVERSATIONS[0], *CONVERSATIONS[::2], CONVERSATIONS[2]])


def test_a_language_model_is_no_reward_model():
    with pytest.raises(ModelError, match=r"reward\.model = tiny:qwen3: not a classifier"):
        load_reward_model("tiny:qwen3", dtype="float32", device="cpu")


def test_a_reward_model_has_one_label(tmp_path):
    classifier_folder(tmp_path, num_labels=2)
    with pytest.raises(ModelError, match="must have one output"):
        load_reward_model(str(tmp_path), dtype="float32", device="cpu")


def test_a_critic_may_start_from_a_classifier(tmp_path):
    model = classifier_folder(tmp_path)
    loaded = load_critic(str(tmp_path), dtype="float32", device="cpu", seed=0)
    assert torch.equal(loaded.score.weight, model.score.weight)
