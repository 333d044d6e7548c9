"""A run that publishes LoRA adapters alone learns, in this process and through servers."""

from __future__ import annotations

import pytest
from command import metrics, train_here

from headwater.observe.run_directory import RunDirectory

SETTINGS = ["quickstart-lora", "rollout.publish=adapter", "trainer.total_steps=20", "eval.every_steps=20"]


def assert_it_learned(root, least: float) -> None:
    run = root / "quickstart-lora"
    first, last = (each["reward/mean"] for each in metrics(run, "eval"))
    assert first < 0.3
    assert last > least
    sizes = [each["weights/bytes"] for each in metrics(run, "train")]
    assert max(sizes) < 1e6, "only the adapters, of a model of 3.4 MB"
    assert len({record["weights"] for record in RunDirectory.open(run).read_ledger()}) == 20, "every step changes them"


@pytest.mark.slow
def test_reward_rises_with_adapters_alone(tmp_path):
    train_here(*SETTINGS, f"run.root={tmp_path}")
    assert_it_learned(tmp_path, least=0.6)


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shared_memory", "collective"])
def test_reward_rises_with_adapters_alone_through_two_servers(tmp_path, transfer):
    servers = ["rollout.placement=disaggregated", "rollout.launch.num_servers=2", "rollout.max_staleness=1"]
    train_here(*SETTINGS, *servers, f"rollout.weight_transfer={transfer}", f"run.root={tmp_path}")
    assert_it_learned(tmp_path, least=0.5)  # the order in which groups end, and thereby the result, differs
