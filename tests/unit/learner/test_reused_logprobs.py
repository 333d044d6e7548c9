"""With recomputed log-probs, the first optimiser step measures itself from its own passes."""

from __future__ import annotations

import pytest
import torch
from learner.test_engine import engine, experience
from learner.test_roles import without

from headwater.algorithms.policy_losses.decoupled import decoupled
from headwater.config.schema import AlgorithmConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import MissingColumn
from headwater.core.learner import MEASURES_ITSELF
from headwater.learner.actor import Actor
from headwater.learner.export import merged_weights


def actor(**settings) -> Actor:
    recomputes = AlgorithmConfig(policy_loss="decoupled", old_logprobs="recompute")
    return Actor(engine(**settings), decoupled, recomputes, loss_width=8)


def rollouts(learner: Actor) -> DataProto:
    """Responses of a policy that was somewhat different, with all advantages of row 3 zero."""
    data = without(experience(1), "old_logprobs")
    own = learner.engine.compute(data)["logprobs"]
    noise = 0.3 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    advantages = data.batch["advantages"].clone()
    advantages[3] = 0.0
    mask = data.batch["response_mask"]
    columns = {"rollout_logprobs": (own + noise) * mask, "advantages": advantages}
    return data.with_columns(tensors=columns, meta_info={MEASURES_ITSELF: True})


def with_old_logprobs(learner: Actor, data: DataProto) -> DataProto:
    return data.with_columns(tensors={"old_logprobs": learner.engine.compute(data)["logprobs"]})


def weights(learner: Actor) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in merged_weights(learner.engine.module.model)])


@pytest.fixture
def passes(monkeypatch):
    """The rows of every pass without a gradient that an update makes."""

    def watched(learner: Actor) -> list[int]:
        counts: list[int] = []
        compute = learner.engine.compute_on_device

        def counted(batch: DataProto, name: str) -> torch.Tensor:
            counts.append(len(batch))
            values = compute(batch, name)
            assert values.untyped_storage().nbytes() == values.nbytes, "no other output is kept for the update"
            return values

        monkeypatch.setattr(learner.engine, "compute_on_device", counted)
        monkeypatch.setattr(learner.engine, "compute", None)
        return counts

    return watched


@pytest.mark.parametrize(("num_minibatches", "rows"), [(1, []), (2, [6]), (3, [8])])
def test_an_update_is_the_one_from_recomputed_log_probs(num_minibatches, rows, passes):
    """Of 12 rows, those of the first mini-batch need no pass. Row 3 has no advantage, and is in the first or second."""
    expected, tested = (actor(num_minibatches=num_minibatches, skip_zero_advantages=True) for _ in range(2))
    data = rollouts(expected)
    before = expected.update(with_old_logprobs(expected, data))
    made = passes(tested)
    stats = tested.update(data)
    assert made == rows
    torch.testing.assert_close(weights(tested), weights(expected), rtol=1e-4, atol=1e-6)
    assert {name for name in stats if not name.startswith("rollout_gap/")} == set(before)
    for name in ("loss", "grad_norm", "behaviour_weight", "approx_kl", "ratio_p01", "ratio_p99", "clip_fraction"):
        assert stats[name] == pytest.approx(before[name], rel=1e-3, abs=1e-5), name
    if num_minibatches == 1:
        assert (stats["ratio_p01"], stats["ratio_p99"], stats["clip_fraction"]) == (1.0, 1.0, 0.0)
    else:
        assert stats["ratio_p99"] > 1.0001, "the second step is measured from the policy before the first"


def test_the_engine_is_compared_with_the_policy_of_the_first_step():
    learner = actor(num_minibatches=2)
    data = rollouts(learner)
    mask = data.batch["response_mask"]
    data = data.with_columns(tensors={"rollout_logprobs": (learner.engine.compute(data)["logprobs"] - 0.25) * mask})
    stats = learner.update(data)
    assert stats["rollout_gap/logprob_abs_mean"] == pytest.approx(0.25, abs=1e-5)
    assert stats["rollout_gap/tokens"] == float(mask[:6].sum())


def test_a_mini_batch_without_an_advantage_is_not_the_first_step(passes):
    """The weights have not changed before the second mini-batch, so it needs no pass either."""
    expected, tested = (actor(num_minibatches=2, skip_zero_advantages=True) for _ in range(2))
    data = rollouts(expected)
    advantages = data.batch["advantages"].clone()
    advantages[:6] = 0.0
    data = data.with_columns(tensors={"advantages": advantages})
    expected.update(with_old_logprobs(expected, data))
    made = passes(tested)
    assert tested.update(data)["optimizer_steps"] == 1
    assert made == []
    torch.testing.assert_close(weights(tested), weights(expected), rtol=1e-4, atol=1e-6)


def test_a_column_that_is_missing_by_mistake_is_named():
    learner = actor()
    data = rollouts(learner).with_columns(meta_info={MEASURES_ITSELF: False})
    for each in (data, data.select(meta_keys=[])):
        with pytest.raises(MissingColumn, match="policy_loss = decoupled needs the column 'old_logprobs'"):
            learner.update(each)


def test_several_epochs_need_the_column():
    learner = actor(num_epochs=2)
    with pytest.raises(MissingColumn, match="policy_loss = decoupled needs the column 'old_logprobs'"):
        learner.update(rollouts(learner))
