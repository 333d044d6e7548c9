"""The benchmarks of asynchrony, at a size at which they say nothing but run."""

from __future__ import annotations

from argparse import Namespace

import pytest
import tiny
import torch

from headwater.config.schema import EngineConfig
from headwater.core.protocols import EpisodeInput
from headwater.engine.engine import Engine
from headwater.models.builtin.tiny import build_tokenizer


@pytest.fixture
def one_thread():
    """What ``run_job`` sets is undone."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_scheduler_overhead_keeps_all_in_flight_and_takes_the_oldest(script):
    overhead = script("scheduler_overhead")
    schedule = overhead.Schedule(num_in_flight=12, num_samples=2, max_staleness=2)
    assert schedule.batch_size == 2
    with overhead.learner_of(schedule) as learner:
        for _ in range(6):
            learner.step()
        batch = learner.executor.prepare_batch(learner)
        counts = learner.executor.check_ledger()
    # At version 6 the learner takes what started at version 4, and two batches are still under way.
    assert {version for each in batch.trajectories for version in each.versions if version >= 0} == {4}
    assert (counts.trained, counts.in_flight) == (12, 4)
    assert overhead.cpu_per_episode_us(schedule, num_episodes=24) > 0
    assert overhead.bytes_per_episode(schedule) > 0


def test_scheduler_overhead_refuses_what_does_not_divide(script):
    with pytest.raises(SystemExit, match="multiple of 6"):
        script("scheduler_overhead").Schedule(num_in_flight=10, num_samples=2, max_staleness=2).batch_size  # noqa: B018


@pytest.mark.slow
def test_latencies_are_the_prompts_and_their_mean_is_as_asked(script):
    workloads = script("async_workloads")
    episodes = [EpisodeInput(tiny.prompt(uid=f"row{row}"), sample, 0) for row in range(250) for sample in range(8)]
    drawn = [workloads.log_normal(each, mean=2.0, sigma=0.7) for each in episodes]
    assert drawn == [workloads.log_normal(each, mean=2.0, sigma=0.7) for each in episodes]
    assert sum(drawn) / len(drawn) == pytest.approx(2.0, rel=0.1)
    assert max(drawn) > 8.0


def test_overlap_of_intervals(script):
    comparison = script("async_vs_sync")
    first = comparison.union([(0.0, 1.0), (0.5, 2.0), (4.0, 5.0)])
    assert first == [(0.0, 2.0), (4.0, 5.0)]
    assert comparison.overlap(first, [(1.5, 4.5)]) == pytest.approx(1.0)
    assert comparison.overlap(first, [(2.0, 4.0)]) == 0


@pytest.mark.slow
def test_async_vs_sync_measures_whole_runs(script, tmp_path):
    comparison, runs = script("async_vs_sync"), script("training_run")
    options = Namespace(steps=3, prompts=2, samples=2, mean_tokens=4, mean_tool_s=0.05, epochs=1)
    for workload in comparison.workloads(options):
        run = runs.train(None, comparison.settings_of(workload, 1, options), tmp_path)
        row = comparison.measure(run, samples_per_step=4)
        assert row["samples_per_s"] == pytest.approx(12 / row["seconds"])
        assert 0 < row["waiting"] < 1
        assert row["max_lag"] <= 1
        assert row["overlap"] <= min(row["generating"], row["training"])


@pytest.mark.slow
def test_update_modes_compute_again_only_when_interrupted(script):
    modes, shapes = script("update_modes"), script("shapes")
    model = shapes.build_model("tiny", torch.device("cpu"), torch.float32)
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    engine = Engine(model, build_tokenizer(), EngineConfig(max_sequences=4, kv_cache_gib=0.05))
    try:
        requests = modes.long_requests(Namespace(requests=8, prompt_tokens=8, new_tokens=24), engine.limits.vocab_size)
        undisturbed, *runs = [
            modes.generate(engine, requests, weights, mode, num_updates=2) for mode in (None, *modes.MODES)
        ]
    finally:
        engine.close()
    again = {run.mode: modes.row_of(run, undisturbed)["tokens_computed_again"] for run in runs}
    assert again["in_flight"] == again["drain"] == 0
    assert again["interrupt"] > 0
    assert {run.tokens for run in runs} == {undisturbed.tokens}
    assert all(len(run.swaps_s) == 2 for run in runs)


@pytest.mark.slow
def test_staleness_learning_from_start_to_picture(script, one_thread, tmp_path):
    learning = script("staleness_learning")
    options = Namespace(minibatches=2, steps=3, prompts=4)
    settings = {**learning.common_settings(options), "data.num_train_rows": 64, "eval.num_prompts": 8}
    start = learning.save_start(0, 1, tmp_path / "start")
    outcomes = [learning.run_job(learning.Job(loss, 2, 0, 1e-3, 1, settings), start) for loss in learning.LOSSES]
    assert all(0 < each.mean_lag <= 2 for each in outcomes)
    rows = learning.rows_of(outcomes)
    assert [(row["loss"], row["max_staleness"]) for row in rows] == [(loss, 2) for loss in sorted(learning.LOSSES)]
    learning.draw(tmp_path / "images" / "staleness.png", rows)
    assert (tmp_path / "images" / "staleness.png").read_bytes().startswith(b"\x89PNG")
