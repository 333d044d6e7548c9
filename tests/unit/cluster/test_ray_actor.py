"""What travels between actors and the training loop: errors, buckets of weights, commands."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from headwater.backends.launch.child import HOST, PORT, Command
from headwater.config.load import load_config
from headwater.core.errors import ConfigError, DiskFull, OtherRankFailed

pytest.importorskip("ray")

from headwater.cluster import ray as cluster_ray
from headwater.cluster.ray_actor import SentError, death_of
from headwater.cluster.ray_rank import pack, unpack


def sent(error: Exception) -> Exception:
    return pickle.loads(pickle.dumps(SentError.of(error))).again()


def test_an_error_arrives_with_its_class_message_and_values():
    arrived = sent(DiskFull("no space", cause="quota", needed_bytes=7))
    assert isinstance(arrived, DiskFull)
    assert (str(arrived), arrived.cause, arrived.needed_bytes) == ("no space", "quota", 7)
    problems = ["a.b = 1: wrong", "c.d = 2: wrong"]
    assert sent(ConfigError(problems, "r.yaml")).problems == tuple(problems)
    assert str(sent(ConfigError(problems, "r.yaml"))) == str(ConfigError(problems, "r.yaml"))


def test_an_error_of_other_code_arrives_as_its_text():
    class Strange(Exception):
        """Cannot be found by its name in another process."""

    told = pickle.loads(pickle.dumps(SentError.of(Strange("what"))))
    assert not told.is_ours
    assert told.told() == "Strange: what"
    assert SentError.of(OtherRankFailed("x")).is_other_rank


def test_the_end_of_an_actor_is_told_in_one_line():
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: LearnerRank\n\tactor_id: 4f84\n"
        "The actor is dead because its worker process has died. Worker exit detail: End of file. Some common causes "
        "include: (1) the OOM killer."
    )
    assert death_of(RuntimeError(text)) == "its worker process has died. Worker exit detail: End of file"


def test_weights_arrive_bit_for_bit_in_every_type():
    bucket = [
        ("a", torch.randn(3, 4).to(torch.bfloat16)),
        ("b", torch.randn(2)),
        ("c", torch.tensor(3.5)),
        ("d", torch.empty(0, 5)),
        ("e", torch.randn(4, 6)[:, ::2]),
    ]
    arrived = dict(unpack(pickle.loads(pickle.dumps(pack(bucket)))))
    for name, tensor in bucket:
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)
    assert pack(None) is None


def test_a_command_is_completed_where_it_runs():
    command = Command(
        ["serve", "--host", HOST, "--port", PORT, '{"a": 1}'], "m", re.compile("x"), {"IP": HOST, "B": "b"}
    )
    arguments = command.at("127.0.0.1").arguments
    assert arguments[:3] == ("serve", "--host", "127.0.0.1")
    assert int(arguments[4]) > 0
    assert arguments[5] == '{"a": 1}'
    assert command.at("127.0.0.1").environment == {"IP": "127.0.0.1", "B": "b"}


def test_a_run_joins_ray_with_its_settings(monkeypatch):
    given = {}

    class Told(Exception):
        pass

    def needs(config, wait_s):
        given["wait_s"] = wait_s
        raise Told

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster_ray.ray, "init", lambda *_, **options: given.update(options))
    monkeypatch.setattr(cluster_ray, "_checked_needs", needs)
    settings = ["cluster=ray", "cluster.object_store_mib=90", "cluster.wait_for_nodes_s=7"]
    with pytest.raises(Told):
        cluster_ray.RayCluster.join(load_config("quickstart", settings).config)
    assert (given["object_store_memory"], given["wait_s"]) == (90 * 2**20, 7)
