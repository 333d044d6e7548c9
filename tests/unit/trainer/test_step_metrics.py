"""The numbers of a step, on hand-computed cases."""

from __future__ import annotations

import gc
import gzip
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from trainer.experience_parts import batch, policy_logprobs, training, with_logprobs

from headwater.algorithms.diagnostics import explained_variance, gap_metrics, gap_sums, token_statistics
from headwater.config.load import load_config
from headwater.core.capabilities import EngineStatus
from headwater.core.errors import ConfigError
from headwater.core.learner import ProfileOrder
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.models.flops import PassFlops, named_peak
from headwater.observe.run_directory import RunDirectory
from headwater.rollout.group import GroupTimes
from headwater.trainer.loop import Trainer
from headwater.trainer.metrics import (
    EngineWatch,
    RunFacts,
    StageMemory,
    length_metrics,
    media_metrics,
    rate_metrics,
    time_metrics,
)


def a_trajectory(num_prompt: int, num_response: int, stop_reason: str = "stop"):
    count = num_prompt + num_response
    return replace(
        tiny.trajectory(0),
        tokens=(7,) * count,
        prompt_length=num_prompt,
        loss_mask=(0,) * num_prompt + (1,) * num_response,
        logprobs=(0.0,) * num_prompt + (-1.0,) * num_response,
        versions=(-1,) * num_prompt + (0,) * num_response,
        stop_reason=stop_reason,
    )


TRAJECTORIES = [a_trajectory(2, 4, "length"), a_trajectory(6, 2), a_trajectory(4, 6, "abort"), a_trajectory(4, 4)]


def test_lengths_and_the_shares_that_reached_their_limit():
    metrics = length_metrics(TRAJECTORIES, max_prompt_tokens=6)
    assert [metrics[f"response_length/{name}"] for name in ("mean", "min", "max")] == [4.0, 2, 6]
    assert metrics["response_length/std"] == pytest.approx(math.sqrt(2))
    assert [metrics[f"prompt_length/{name}"] for name in ("mean", "min", "max")] == [4.0, 2, 6]
    ratios = ("response_length/clip_ratio", "response_length/aborted_ratio", "prompt_length/clip_ratio")
    assert [metrics[name] for name in ratios] == [0.25, 0.25, 0.25]
    assert metrics["stopped_fraction"] == 0.5


def shown(kind: str, name: str, start: int, length: int):
    return PlacedMedia(MediaContent.of(kind, [name.encode()]), (MediaBlock(start, length),))


def test_images_of_a_step_count_once_and_their_tokens_where_they_stand():
    none, one, two, _ = TRAJECTORIES
    assert media_metrics([none, one]) == {}
    cat, dog, film = shown("image", "cat", 1, 3), shown("image", "dog", 4, 2), shown("video", "film", 5, 4)
    in_prompt = [none, replace(one, media=(cat,)), replace(one, media=(cat, dog))]
    assert media_metrics(in_prompt) == {
        "media/images": 2, "media/prompt_tokens_mean": 8 / 3, "media/prompt_tokens_max": 5,
    }  # fmt: skip
    assert media_metrics([replace(two, media=(cat, film)), none]) == {
        "media/images": 1, "media/videos": 1, "media/prompt_tokens_mean": 1.5, "media/prompt_tokens_max": 3,
        "media/response_tokens_mean": 2, "media/response_tokens_max": 4,
    }  # fmt: skip


def test_rates_are_per_token_and_per_device():
    metrics = rate_metrics(TRAJECTORIES, {"generate": 0.8}, {"wait": 0.6, "train": 1.4}, num_devices=4)
    assert (metrics["tokens/total"], metrics["tokens/trained"]) == (32, 16)
    assert metrics["throughput/tokens_per_s"] == pytest.approx(16)
    assert metrics["throughput/tokens_per_s_per_device"] == pytest.approx(4)
    assert metrics["time_per_token/generate_ms"] == pytest.approx(50), "per response token"
    assert metrics["time_per_token/train_ms"] == pytest.approx(1400 / 32)
    assert "time_per_token/experience_ms" not in metrics


def test_episodes_are_timed_by_what_they_did():
    times = [GroupTimes(3.0, (), (), ({"total": 1.0, "generating": 0.5}, {"total": 3.0, "calling_tools": 2.0}))]
    metrics = time_metrics(times)
    assert [metrics[f"time/episode/total_s/{name}"] for name in ("mean", "min", "max")] == [2.0, 1.0, 3.0]
    assert metrics["time/episode/calling_tools_s/max"] == 2.0


def test_devices_are_ranks_and_servers():
    for settings, expected in (
        ([], 2),
        (["rollout.placement=disaggregated"], 3),
        (["rollout.placement=disaggregated", "rollout.launch.num_servers=3"], 5),
        (["rollout.servers=[http://a:1, http://b:1]", "rollout.backend=native"], 4),
    ):
        facts = RunFacts.of(load_config("quickstart", settings).config, num_ranks=2)
        assert facts.num_devices == expected


def test_memory_belongs_to_the_stage_that_used_it():
    gc.collect()  # or else what earlier tests have left may be freed meanwhile
    memory = StageMemory()
    memory.leave("train")
    torch.ones(2**26)  # 256 MiB, which are freed at once
    memory.leave("publish")
    held = torch.ones(2**26)
    memory.leave("save")
    metrics = memory.take()
    for stage in ("publish", "save"):
        assert metrics[f"memory/{stage}/host_gib"] - metrics["memory/train/host_gib"] > 0.2, len(held)
    assert metrics["memory/host_peak_gib"] == max(metrics[f"memory/{each}/host_gib"] for each in ("publish", "save"))
    # The files that this process has mapped are part of its memory, and may be available memory of the machine.
    own_kib = int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert metrics["memory/machine_used_gib"] > own_kib / 2**20 > 0.2
    assert "memory/train/host_gib" not in memory.take()


def test_the_engine_s_counters_are_those_of_the_step():
    seen = [
        EngineStatus(0, 3, 1, metrics={"kv_pages_total": 8, "kv_pages_used": 4, "num_tokens_cached": 10,
                                       "num_tokens_prefilled": 30, "num_preempted": 1}),
        EngineStatus(0, 1, 0, metrics={"kv_pages_total": 8, "kv_pages_used": 2, "num_tokens_cached": 40,
                                       "num_tokens_prefilled": 40, "num_preempted": 1}),
        EngineStatus(0, 1, 0, metrics={"last_update_pause_s": 0.5}),
        EngineStatus(0, 1, 0, metrics={"num_tokens_cached": 44, "num_tokens_prefilled": 40, "num_preempted": 1}),
        EngineStatus(0, 0, 0, metrics={"kv_pages_total": 8, "kv_pages_used": 0, "num_tokens_cached": 5,
                                       "num_tokens_prefilled": 15, "num_preempted": 0}),
    ]  # fmt: skip
    watch = EngineWatch(lambda: seen[0])
    first = watch.take()
    assert (first["engine/running_max"], first["engine/kv_used_mean"], first["engine/preempted"]) == (3, 0.5, 1)
    seen.pop(0)
    second = watch.take()
    assert second["engine/cache_hit_fraction"] == 0.75
    assert (second["engine/preempted"], second["engine/running_mean"]) == (0, 2.0)
    seen.pop(0)
    assert watch.take()["engine/cached_tokens"] == 0, "the engine did not tell its counters"
    seen.pop(0)
    assert watch.take()["engine/cached_tokens"] == 4, "since it told them last"
    seen.pop(0)
    assert watch.take()["engine/cached_tokens"] == 5, "the engine was replaced, and counts from 0"
    partial = EngineWatch(lambda: EngineStatus(0, metrics={"num_tokens_prefilled": 15})).take()
    assert partial["engine/prefilled_tokens"] == 15
    assert not {"engine/cached_tokens", "engine/cache_hit_fraction"} & partial.keys(), "the engine does not tell"
    with EngineWatch(lambda: EngineStatus(0, is_reachable=False), is_local=False, every_s=0.001) as unknown:
        assert unknown.take() == {}


def test_the_gap_between_two_programs_by_hand():
    mine, theirs = torch.tensor([[0.5, 0.25, 9.0]]).log(), torch.tensor([[0.25, 0.25, float("nan")]]).log()
    metrics = gap_metrics(*gap_sums(mine, theirs, torch.tensor([[1, 1, 0]])))
    assert metrics["tokens"] == 2
    half = math.log(2) / 2
    for name, expected in (("mean", half), ("std", half), ("max", 2 * half)):
        assert metrics[f"logprob_abs_{name}"] == pytest.approx(expected)
    for name, expected in (("mean", 0.125), ("std", 0.125), ("max", 0.25)):
        assert metrics[f"prob_abs_{name}"] == pytest.approx(expected)
    assert metrics["kl"] == pytest.approx(-half)
    assert metrics["k3_kl"] == pytest.approx((2 - math.log(2) - 1) / 2)
    assert "prob_correlation" not in metrics, "all probabilities of the engine are equal"
    assert gap_metrics(*gap_sums(mine, theirs, torch.zeros(1, 3))) == {}


def test_statistics_of_values_by_hand():
    values, mask = torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[1, 1, 0]])
    assert token_statistics(values, mask) == {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    assert token_statistics(values, mask * 0) == {}
    assert explained_variance(values, values, mask) == pytest.approx(1.0)
    assert explained_variance(values * 0, values, mask) == pytest.approx(0.0, abs=1e-4)


def test_every_update_compares_the_engine_with_the_policy_before_it():
    parts = training("learner.num_minibatches=2", "trainer.num_prompts_per_step=2")
    rollouts = batch()
    rollouts = with_logprobs(rollouts, policy_logprobs(parts, rollouts) - 0.25)
    stats = parts.learner.update(parts.experience.make(rollouts, version=0).data)
    assert stats["actor/optimizer_steps"] == 2
    assert stats["rollout_gap/logprob_abs_mean"] == pytest.approx(0.25, abs=1e-5)
    assert stats["rollout_gap/tokens"] == 10, "the first of two mini-batches"
    assert not any(name.startswith("actor/rollout_gap") for name in stats)
    assert stats["throughput/actor_tflops_per_s"] > 0
    assert "mfu/actor" not in stats, "nobody knows what this processor could do"


def test_operations_are_those_of_the_tokens_that_are_computed():
    parts = training("learner.skip_zero_advantages=false")
    model, layers = parts.learner.actor.engine.module.model, parts.learner.actor.engine.module.layers
    flops = PassFlops.of(model, layers, num_outputs=512)
    config = model.config
    attention = config.hidden_size * config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    weights = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    assert flops.per_token == 2 * weights
    assert flops.per_pair == 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    data = parts.experience.make(batch(num_groups=1), version=0).data
    stats = parts.learner.actor.update(data)
    prompt = int(data.batch["attention_mask"].sum() - data.batch["response_mask"].sum()) // 4
    # Responses have 1 to 4 tokens, of which the last is only predicted; the prompt is computed once.
    pairs = prompt * (prompt + 1) / 2 + sum(each * prompt + each * (each + 1) / 2 for each in range(4))
    forward = flops.per_token * (prompt + 6) + flops.per_pair * pairs + 2 * config.hidden_size * config.vocab_size * 10
    assert stats["flops"] == pytest.approx(3 * forward)
    assert (named_peak("NVIDIA H100 PCIe"), named_peak("NVIDIA H200"), named_peak("Abacus")) == (756e12, 989e12, None)


def test_chosen_steps_are_profiled(tmp_path):
    parts = training()
    data = parts.experience.make(batch(), version=0).data
    for name, ranks in (("step_000001", (0,)), ("step_000002", (1,))):
        parts.learner.profile(ProfileOrder(tmp_path, name, ranks, memory=True))
        parts.learner.update(data)
        parts.learner.profile(None)
    (trace,) = tmp_path.iterdir()
    assert trace.name == "step_000001_rank_0.json.gz", "rank 1 is not this one"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"aten::mm", "[memory]"} <= {each.get("name") for each in events}
    with pytest.raises(ConfigError, match=r"trainer.profile.ranks = \[0, 1\]: the learner has 1 ranks"):
        training("trainer.profile.steps=[1]", "trainer.profile.ranks=[0, 1]")


def test_the_loop_orders_the_profile_of_the_settings(tmp_path):
    settings = ["trainer.profile={steps: [3], ranks: [1, 2], memory: true}"]
    orders = []
    loop = SimpleNamespace(
        _config=load_config("quickstart", settings).config,
        _run=RunDirectory(tmp_path),
        _learner=SimpleNamespace(profile=orders.append),
    )
    for step, is_start in ((2, True), (3, True), (3, False)):
        Trainer._profile(loop, step, is_start=is_start)
    assert orders == [ProfileOrder(tmp_path / "profile", "step_000003", (1, 2), memory=True), None]
