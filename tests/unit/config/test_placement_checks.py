"""Settings of an engine that has a process of its own."""

from __future__ import annotations

import pytest

from headwater.config.load import load_config

OWN = "rollout.placement=disaggregated"


@pytest.mark.parametrize(
    ("overrides", "blamed", "mentions"),
    [
        ([OWN, "rollout.backend=hf"], "rollout.placement = 'disaggregated'", ["rollout.backend=embedded", "colocated"]),
        (
            ["rollout.weight_transfer=file"],
            "rollout.weight_transfer = 'file'",
            ["rollout.placement=disaggregated", "shared_memory"],
        ),
        (
            [OWN, "learner.offload_during_rollout=true"],
            "learner.offload_during_rollout = true",
            ["rollout.placement=colocated", "set it to false"],
        ),
        (
            ["rollout.max_staleness=2", "learner.offload_during_rollout=true"],
            "learner.offload_during_rollout = true",
            ["rollout.max_staleness = 2", "rollout.max_staleness=0"],
        ),
    ],
)
def test_a_clash_names_the_setting_and_the_remedy(problems, overrides, blamed, mentions):
    found = [line for line in problems(None, *overrides) if line.startswith(blamed)]
    assert any(all(text in line for text in mentions) for line in found), problems(None, *overrides)


def test_settings_that_go_together_load():
    config = load_config(None, [OWN, "rollout.weight_transfer=file"]).config
    assert config.rollout.weight_transfer == "file"
