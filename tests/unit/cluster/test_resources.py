"""What a run needs of a cluster, and the messages about what is missing."""

from __future__ import annotations

import pytest

from headwater.cluster import ray as ray_cluster
from headwater.cluster.resources import Need, Node, Room, needs_of, num_servers, shortages, without_gpus
from headwater.config.load import load_config
from headwater.core.errors import ConfigError

BIG = Node("10.0.0.1", Room(cpus=8, gpus=4), {"zone": "a"})
SMALL = Node("10.0.0.2", Room(cpus=2), {"zone": "b"})


def ranks(count: int, **changes: object) -> Need:
    fields = {"labels_key": "cluster.learner.labels", **changes}
    return Need("learner ranks", "cluster.learner.num_ranks", count, Room(cpus=1, gpus=1), **fields)


def ray_config(*settings: str):
    return load_config("quickstart", ["cluster=ray", *settings]).config


def test_a_run_that_fits_has_no_shortage():
    assert shortages([ranks(4), Need("rollout servers", "k", 2, Room(cpus=1))], [BIG, SMALL]) == []


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (ranks(5), ["cluster.learner.num_ranks = 5", "5 CPUs and 5 GPUs in total", "10.0.0.1 with 8 CPUs and 4 GPUs"]),
        (ranks(1, labels={"zone": "b"}), ["no node with these labels has that", "1 CPU and 1 GPU", "10.0.0.2"]),
        (ranks(1, labels={"zone": "c"}), ["cluster.learner.labels", "zone=c", "labels zone=a"]),
        (ranks(2, strategy="strict_spread"), ["separate node", "only 1 nodes", "use spread"]),
        (Need("learner ranks", "k", 9, Room(cpus=1), strategy="strict_pack"), ["on one node", "use pack"]),
    ],
)
def test_a_shortage_says_what_is_needed_what_there_is_and_which_key(need, words):
    (problem,) = shortages([need], [BIG, SMALL])
    assert all(word in problem for word in words), problem


def test_needs_that_fit_alone_but_not_together_name_all_keys():
    needs = [Need("learner ranks", "a.b", 6, Room(cpus=1)), Need("rollout servers", "c.d", 5, Room(cpus=1))]
    (problem,) = shortages(needs, [BIG, SMALL])
    assert "11 CPUs in total" in problem
    assert "a.b" in problem
    assert "c.d" in problem


def test_colocated_servers_share_the_bundle_of_their_rank():
    config = ray_config("cluster.learner.num_ranks=2", "cluster.rollout.cpus_per_server=2")
    (need,) = needs_of(config, has_gpus=True)
    assert (need.count, need.each) == (2, Room(cpus=3, gpus=1))
    assert num_servers(config) == 2


def test_disaggregated_servers_need_their_own_room():
    config = ray_config("rollout.placement=disaggregated", "rollout.launch.num_servers=3", "rollout.device=cpu")
    learner, servers = needs_of(config, has_gpus=True)
    assert learner.each == Room(cpus=1, gpus=1)
    assert (servers.count, servers.each) == (3, Room(cpus=1))
    assert num_servers(ray_config("rollout.placement=disaggregated", "rollout.launch.num_servers=4")) == 4


def test_nccl_needs_gpus_in_the_cluster():
    disaggregated = ("rollout.placement=disaggregated", "rollout.weight_transfer=collective")
    config = ray_config(*disaggregated, "rollout.weight_link=nccl")
    assert without_gpus(config, needs_of(config, has_gpus=True)) == []
    (problem,) = without_gpus(config, needs_of(config, has_gpus=False))
    assert "rollout.weight_link = nccl" in problem
    assert "the learner ranks and rollout servers of this cluster have no GPUs" in problem
    assert "use rollout.weight_link=gloo" in problem
    plain = ray_config(*disaggregated)
    assert without_gpus(plain, needs_of(plain, has_gpus=False)) == []


def test_running_servers_and_a_cpu_model_need_nothing_more():
    config = ray_config("rollout.backend=native", "rollout.servers=[http://10.0.0.9:1]", "model.device=cpu",
                        "rollout.weight_transfer=file", "rollout.weight_folder=/x",
                        "cluster.reward.num_actors=2", "cluster.reward.cpus_per_actor=3",
                        "tools.use=[calculator]", "rollout.workflow=tool_agent",
                        "cluster.tools.num_actors=4")  # fmt: skip
    learner, reward, tools = needs_of(config, has_gpus=True)
    assert (tools.what, tools.count, tools.each) == ("tool actors", 4, Room(cpus=1))
    assert learner.each == Room(cpus=1)
    assert (reward.what, reward.count, reward.each) == ("reward actors", 2, Room(cpus=3))


def test_every_setting_of_an_actor_is_part_of_what_it_needs():
    config = ray_config(
        "cluster.learner={num_ranks: 2, cpus_per_rank: 3, strategy: spread, labels: {zone: a}}",
        "rollout.placement=disaggregated", "rollout.backend=vllm", "rollout.launch.num_servers=3",
        "rollout.launch.tensor_parallel=2", "cluster.rollout={cpus_per_server: 4, labels: {zone: b}}",
        "cluster.reward={num_actors: 5, cpus_per_actor: 6, labels: {zone: c}}",
        "tools.use=[calculator]", "rollout.workflow=tool_agent",
        "cluster.tools={num_actors: 7, cpus_per_actor: 8, labels: {zone: d}}",
    )  # fmt: skip
    learner, servers, reward, tools = needs_of(config, has_gpus=True)
    assert (learner.count, learner.each, learner.strategy) == (2, Room(cpus=3, gpus=1), "spread")
    assert (servers.count, servers.each) == (3, Room(cpus=4, gpus=2))
    assert (reward.count, reward.each) == (5, Room(cpus=6))
    assert (tools.count, tools.each) == (7, Room(cpus=8))
    assert [dict(need.labels) for need in (learner, servers, reward, tools)] == [{"zone": name} for name in "abcd"]


def test_weights_reach_servers_on_other_machines(monkeypatch):
    place = ray_cluster.ActorPlace(BIG.name, "n", 1)
    monkeypatch.setattr(ray_cluster.ActorPlace, "here", lambda: place)

    def chosen(*settings: str):
        config = ray_config("rollout.placement=disaggregated", *settings)
        return ray_cluster.RayCluster(config, []).weight_transfer()

    told = ("rollout.backend=vllm", "rollout.weight_transfer=file")
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: [BIG])
    assert chosen() is chosen("rollout.backend=vllm") is chosen(*told) is None, "one machine"
    ranks = "cluster.learner.num_ranks=2"
    assert chosen(ranks) == "collective", "straight from the ranks"
    assert chosen(ranks, "rollout.backend=vllm") is chosen(ranks, "rollout.weight_transfer=file") is None
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: [BIG, SMALL])
    assert chosen() == "collective"
    assert chosen("rollout.backend=vllm", "rollout.weight_folder=/shared") == "file"
    assert chosen("rollout.backend=vllm") == "collective"
    assert chosen(*told, "rollout.weight_folder=/shared") is None, "the config decides"
    with pytest.raises(ConfigError, match=r"rollout\.weight_transfer = file: .* set rollout\.weight_folder"):
        chosen(*told)
