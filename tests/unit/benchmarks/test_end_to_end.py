"""The comparison of whole steps, at a size at which it says nothing but runs."""

from __future__ import annotations

import json
import sys

import pytest
import torch


@pytest.fixture
def end_to_end(script):
    return script("end_to_end")


def job_of(end_to_end, monkeypatch, tmp_path, *arguments: str):
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", "--device", "cpu", *arguments])
    return end_to_end._job(end_to_end._options(), torch.device("cpu"), tmp_path)


def test_prompts_have_the_length_that_was_asked_for(end_to_end, monkeypatch, tmp_path):
    job = job_of(end_to_end, monkeypatch, tmp_path, "--prompts", "3", "--prompt-tokens", "60", "--lora-rank", "2")
    assert len({chat[-1]["content"] for chat in job.chats}) == 3
    assert min(job.prompt_tokens) >= 60
    assert max(job.prompt_tokens) <= 60 + 12, "at most one word too long"
    assert (job.num_responses, job.lora_rank, job.dtype) == (12, 2, "float32")


def test_the_floor_is_that_of_rollouts_and_training(end_to_end, monkeypatch, tmp_path):
    throughput = end_to_end.measure_ceilings.__globals__
    ceilings = throughput["Ceilings"](copy_bytes_per_s=1e9, matmul_flop_per_s=1e12)
    job = job_of(end_to_end, monkeypatch, tmp_path, "--prompts", "2", "--samples", "2", "--trl-microbatch", "4")
    floor = end_to_end._floor(job, ceilings)
    assert floor["step"] == floor["rollout"] + floor["train"]
    assert floor["train"] == floor["train_flop"] / 1e12
    # Three products with every layer of the tiny model, on every token once; the output layer and attention are added.
    tokens = sum(job.prompt_tokens) + 4 * (job.num_new_tokens - 1)
    assert floor["train_flop"] > 3 * 2 * 4 * 196_608 * tokens
    assert floor["train_flop"] < 2 * 3 * 2 * 4 * 196_608 * tokens


def test_stages_and_the_rest_add_up_to_the_step(script):
    step = script("end_to_end_job").Step.of(10.0, {"rollout": 4.0, "train": 5.0, "generate": 3.0})
    assert step.stages["other"] == 1.0
    assert sum(step.stages.get(name, 0.0) for name in script("end_to_end_job").STAGES) == step.seconds


def test_a_side_that_is_not_installed_is_named(end_to_end, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    told = end_to_end._missing(str(bare), "trl+vllm", torch.device("cuda"))
    assert told == "trl and vllm are not installed"
    assert "needs a GPU" in end_to_end._missing(sys.executable, "trl+vllm", torch.device("cpu"))
    assert end_to_end._missing(sys.executable, "headwater", torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["rollout.max_staleness"], "must be KEY=VALUE"), (["--trl-microbatch", "5"], "must divide the 16 samples")],
)
def test_options_that_cannot_work_are_refused(end_to_end, monkeypatch, tmp_path, capsys, arguments, told):
    with pytest.raises(SystemExit):
        job_of(end_to_end, monkeypatch, tmp_path, *arguments)
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_whole_steps_are_measured_and_what_is_missing_is_said(end_to_end, monkeypatch, tmp_path):
    out = tmp_path / "record.json"
    sizes = ["--prompts", "2", "--samples", "2", "--new-tokens", "4", "--trl-microbatch", "4", "--runs", "1"]
    others = ["--sides", "headwater", "trl+vllm", "--out", str(out), "learner.num_minibatches=2"]
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", "--device", "cpu", *sizes, *others])
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc1234")
    end_to_end.main()
    record = json.loads(out.read_text())
    ours = record["sides"]["headwater"]
    assert record["commit"] == "abc1234"
    assert record["settings"]["settings"] == ["learner.num_minibatches=2"]
    assert list(record["left_out"]) == ["trl+vllm"]
    assert len(ours["steps"]) == len(ours["held_gib"]) == 2
    assert ours["first_step_s"] == ours["steps"][0]["seconds"]
    assert ours["new_tokens"] == 2 * 2 * 4
    assert ours["step_s"] > ours["stages"]["train"] > 0
    assert ours["peak_gib"] > 0
    assert record["floor"]["step"] > 0
