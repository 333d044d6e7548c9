"""The rollout benchmarks, at a size at which they say nothing but run, and what their floor counts."""

from __future__ import annotations

import json
import sys

import pytest
import torch


@pytest.fixture
def record_of(script, tmp_path, monkeypatch):
    """Runs a benchmark with arguments and returns what it wrote."""

    def run(name: str, *arguments: str) -> dict:
        out = tmp_path / "record.json"
        monkeypatch.setattr(sys, "argv", [name, *arguments, f"--out={out}"])
        monkeypatch.setenv("BENCHMARK_COMMIT", "abc1234")
        script(name).main()
        record = json.loads(out.read_text())
        assert record["commit"] == "abc1234"
        assert record["arguments"] == list(arguments)
        return record

    return run


@pytest.fixture
def fake_vllm(tmp_path):
    """An interpreter whose vLLM takes no time to load, half a second a run, and remembers what it was given."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import json, pathlib, time\n"
        "__version__ = '0.0.1'\n"
        "class Some:\n"
        "    def __init__(self, **values): self.__dict__.update(values)\n"
        "SamplingParams = Some\n"
        "class LLM(Some):\n"
        "    def generate(self, prompts, sampling, use_tqdm):\n"
        "        time.sleep(0.5 if sampling.max_tokens == 24 else 0)\n"
        "        tokens = [0] * sampling.max_tokens\n"
        "        made = [Some(token_ids=tokens, logprobs=tokens) for _ in range(sampling.n)]\n"
        "        return [Some(outputs=made) for _ in prompts]\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.slow
def test_rollouts_of_both_sides_are_recorded(record_of, fake_vllm):
    arguments = ["--shape", "tiny", "--cases", "4x24", "--samples", "2", "--prompt-tokens", "6", "--runs", "1"]
    record = record_of("rollout_throughput", *arguments, "--vllm-python", str(fake_vllm))
    [result] = record["results"]
    assert result["prefilled_tokens"] == 2 * 6
    assert record["vllm"]["version"] == "0.0.1"
    [seconds] = record["vllm"]["seconds"]["4x24"]
    assert seconds >= 0.5
    assert result["vllm_tokens_per_s"] == pytest.approx(4 * 24 / seconds)
    assert result["engine_tokens_per_s"] == pytest.approx(4 * 24 / min(result["engine_runs_s"]))


@pytest.mark.slow
def test_rollouts_with_a_filter_are_timed_beside_plain_ones(record_of):
    arguments = ["--shape", "tiny", "--cases", "4x24", "--prompt-tokens", "6", "--runs", "1", "--no-baseline"]
    record = record_of("rollout_throughput", *arguments, "--top-p", "0.9", "--top-k", "40")
    [result] = record["results"]
    assert record["filters"] == {"top_k": 40, "top_p": 0.9}
    assert result["filtered_tokens_per_s"] == pytest.approx(4 * 24 / min(result["filtered_runs_s"]))


@pytest.mark.slow
def test_rollouts_with_stop_strings_make_as_many_tokens(record_of):
    arguments = ["--shape", "tiny", "--cases", "4x24", "--prompt-tokens", "6", "--runs", "1", "--no-baseline"]
    [result] = record_of("rollout_throughput", *arguments, "--stop", "</answer>", "--stop", "zzzz")["results"]
    assert result["engine_tokens_per_s"] > 0


@pytest.mark.slow
def test_the_cost_of_stop_strings_is_recorded(record_of):
    record = record_of("stop_strings", "--rows", "16", "--rounds", "3", "--stop", "\x07\x08\x0b")
    assert len(record["seconds"]) == 3
    assert record["share_looked_at"] < 0.5


def test_filtered_sampling_is_timed_with_none_one_and_all_rows(record_of):
    record = record_of("sampling_filters", "--rows", "4", "--vocabulary", "3000", "--runs", "2")
    filters = ("top_k", "top_p", "min_p", "top_k_top_p")
    names = ["none", *(f"{name}_{rows}" for name in filters for rows in ("one", "all")), "sorted_completely"]
    assert {name: len(times) for name, times in record["seconds"].items()} == dict.fromkeys(names, 2)


def test_a_vllm_that_fails_is_told_with_its_words(script, tmp_path):
    side, shapes = script("vllm_side"), script("shapes")
    model = shapes.build_model("tiny", torch.device("cpu"), torch.float32)
    with pytest.raises(RuntimeError, match=r"(?s)code 1:.*No module named 'vllm'"):
        side.run_vllm(sys.executable, model, [side.VllmCase("2x4", 2, 4, 1, 3)], 1)


def test_graphs_of_vllm_reach_to_its_largest_batch(script):
    settings = script("vllm_side")._settings(torch.device("cuda"), 96)
    assert settings["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 32, 64, 96]


@pytest.mark.slow
def test_a_weight_swap_says_what_is_computed_again(record_of):
    arguments = ["--shape", "tiny", "--sequences", "4", "--updates", "2", "--new-tokens", "1500"]
    rows = {row["mode"]: row for row in record_of("weight_swap", *arguments)["rows"]}
    assert rows["in_flight"]["tokens_computed_again"] == 0
    assert rows["interrupt"]["tokens_computed_again"] >= 4 * 128
    assert all(len(row["pauses_ms"]) == 2 for row in rows.values())


@pytest.mark.parametrize("tied", [True, False])
def test_the_floor_counts_what_must_be_read_and_multiplied(script, tied):
    throughput, shapes = script("rollout_throughput"), script("shapes")
    config = shapes.build_model("tiny", torch.device("cpu"), torch.float32).config
    config.tie_word_embeddings = tied
    model = type(shapes.build_model("tiny", torch.device("cpu"), torch.float32))(config)
    # Width 128, keys and values 64 with biases of q, k and v, between 384, two norms; four layers, a norm, the head.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 128 + 2 * 64 + 3 * 128 * 384 + 2 * 128
    body, head = 4 * layer + 128, 512 * 128
    kv_bytes = 2 * 4 * 64 * 4
    ceilings = throughput.Ceilings(copy_bytes_per_s=1e9, matmul_flop_per_s=1e12)
    weight_s = max((body + head) * 4 / 1e9, 2 * (body + head) * 8 / 1e12)
    step_s = weight_s + (2 * 10 + 8 * 6 / 2) * kv_bytes / 1e9
    # Ten tokens attend to 55 pairs: two products over a width of 128 in four layers.
    attention = 2 * 2 * 128 * 4 * 55
    expected = 8 * 6 / (2 * (2 * body * 10 + attention) / 1e12 + 6 * step_s)
    case = throughput.Case(sequences=8, new_tokens=6)
    assert throughput.floor_tokens_per_s(model, case, 2, 10, ceilings) == pytest.approx(expected)


@pytest.mark.slow
def test_every_case_may_have_prompts_of_its_own_length(record_of):
    arguments = ["--shape", "tiny", "--cases", "2x8", "2x8@96", "--prompt-tokens", "6", "--runs", "1", "--no-baseline"]
    short, long = record_of("rollout_throughput", *arguments)["results"]
    assert (short["case"], short["prefilled_tokens"]) == ("2x8", 2 * 6)
    assert (long["case"], long["prefilled_tokens"]) == ("2x8@96", 2 * 96)
    # Two values of 64 numbers of four bytes in each of four layers.
    assert long["kv_gib_needed"] == 2 * (96 + 8) * 2 * 64 * 4 * 4 / 2**30
    assert long["preempted"] == 0


@pytest.mark.slow
def test_prompts_with_pictures_are_compared_with_prompts_of_text(record_of):
    record = record_of(
        "vision_throughput", "--sequences", "4", "--samples", "1", "2", "--new-tokens", "4", "--runs", "1"
    )
    assert [each["samples_per_prompt"] for each in record["results"]] == [1, 2]
    for each in record["results"]:
        assert each["prompt_tokens"] == 16 + 64
        assert each["vllm_tokens_per_s"] is None
        assert min(each["media_tokens_per_s"], each["text_tokens_per_s"], each["reading_s"], each["tower_s"]) > 0
