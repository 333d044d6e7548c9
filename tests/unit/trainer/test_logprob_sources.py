"""What computes the log-probs that an update is measured from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.trainer.logprob_sources import logprob_sources, needs_logprobs_first

RECOMPUTE = "algorithm.old_logprobs=recompute"


def is_needed_first(*overrides: str, is_saved: bool = True) -> bool:
    config = load_config(None, ["data.train=arithmetic", "model.path=tiny", *overrides]).config
    return needs_logprobs_first(config, is_saved=is_saved)


def test_the_update_computes_them_unless_something_reads_them_before():
    assert not is_needed_first()
    assert not is_needed_first(RECOMPUTE)
    assert not is_needed_first(RECOMPUTE, "learner.num_minibatches=2", "algorithm.policy_loss=decoupled")
    assert not is_needed_first("algorithm.old_logprobs=loglinear", "rollout.max_staleness=2")
    saves = [RECOMPUTE, "trainer.save_learner_logprobs=true"]
    assert is_needed_first(*saves)
    assert not is_needed_first(*saves, is_saved=False)


@pytest.mark.parametrize(
    "reads_them",
    [
        ["algorithm.old_logprobs=metrics"],
        ["algorithm.corrections=[truncate]"],
        ["algorithm.kl_in_reward=0.1"],
        ["algorithm.kl_in_loss=0.1", "learner.skip_zero_advantages=false"],
        ["algorithm.advantage=optimal_token_baseline"],
        ["learner.num_epochs=2"],
        ["reward.join=late"],
    ],
)
def test_a_pass_computes_them_where_something_does(reads_them):
    assert is_needed_first(RECOMPUTE, *reads_them, is_saved=False)


def test_an_advantage_of_a_user_may_read_them(tmp_path):
    (tmp_path / "mine.py").write_text("def advantage(inputs):\n    return inputs.old_logprobs\n")
    assert is_needed_first(RECOMPUTE, f"algorithm.advantage={tmp_path}/mine.py:advantage", is_saved=False)


def test_a_run_says_which_log_probs_it_uses():
    def sources(**changes) -> str:
        return logprob_sources(replace(Config(), algorithm=replace(Config().algorithm, **changes)))

    assert sources() == (
        "Log-probs: the engine (embedded) records those of sampled tokens; updates are measured from the same "
        "log-probs (algorithm.old_logprobs = rollout); no reference model is used"
    )
    assert "which a forward pass computes before the update" in sources(old_logprobs="metrics")
    assert "which the first optimiser step computes itself (algorithm" in sources(old_logprobs="recompute")
    assert "which a forward pass computes before the update" in sources(old_logprobs="recompute", kl_in_loss=0.1)
    assert "the reference model computes those of algorithm.kl_in_loss" in sources(kl_in_loss=0.1)
