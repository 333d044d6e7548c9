"""The section ``cluster``: its short form, and settings that clash with others."""

from __future__ import annotations

import pytest

from headwater.config.explain import to_yaml
from headwater.config.load import load_config
from headwater.core.errors import ConfigError


def test_cluster_ray_is_short_for_its_kind(tmp_path):
    assert load_config("quickstart", ["cluster=ray"]).config.cluster.kind == "ray"
    recipe = tmp_path / "r.yaml"
    recipe.write_text("extends: quickstart\ncluster: ray\n")
    both = load_config(recipe, ["cluster.learner.num_ranks=2"])
    assert (both.config.cluster.kind, both.config.cluster.learner.num_ranks) == ("ray", 2)
    with pytest.raises(ConfigError, match=r"cluster\.kind = 'slurm'.*local.*ray"):
        load_config("quickstart", ["cluster=slurm"])


def test_a_resolved_recipe_loads_again(tmp_path):
    given = ["cluster=ray", "cluster.learner.labels={zone: a}", "rollout.placement=disaggregated"]
    config = load_config("quickstart", given).config
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "resolved.yaml").config == config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["cluster.learner.num_ranks=2"], ["cluster.learner.num_ranks", "use cluster=ray"]),
        (["cluster=ray", "rollout.placement=disaggregated", "rollout.launch.devices=[cpu]"], ["Ray chooses"]),
        (["cluster=ray", "rollout.launch.num_servers=2"], ["only cluster.learner.num_ranks = 1", "disaggregated"]),
        (["cluster=ray", "cluster.rollout.labels={a: b}"], ["cluster.rollout.labels", "cluster.learner.labels"]),
        (["cluster=ray", "model.device=cuda:1"], ["model.device", "auto, cuda or cpu"]),
        (["cluster=ray", "cluster.learner.num_ranks=999"], ["only 256 samples"]),
        (
            ["cluster=ray", "cluster.learner.num_ranks=3", "learner.context_parallel=2"],
            ["learner.context_parallel", "3 ranks cannot form groups of 2"],
        ),
        (["cluster=ray", "cluster.max_restarts=1"], ["trainer.checkpoint_every_steps"]),
        (["cluster=ray", "cluster.reward.num_actors=1", "reward.where=threads"], ["reward.where=processes"]),
        (["cluster=ray", "cluster.reward.labels={a: b}"], ["cluster.reward.num_actors"]),
        (["cluster=ray", "cluster.tools.cpus_per_actor=2"], ["set cluster.tools.num_actors"]),
        (["cluster=ray", "cluster.tools.num_actors=1"], ["the recipe has no tools; set tools.use"]),
    ],
)
def test_a_clash_names_the_key_and_the_remedy(settings, words):
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", settings)
    assert all(word in str(caught.value) for word in words), caught.value
