"""Ranks that compute every pack together: results equal those of one rank, and each rank has its part of the tokens."""

from __future__ import annotations

import forked
import pytest
import torch
from integration import context_ranks
from integration.command import environment_of_ranks
from integration.test_torchrun import COARSE, LIMIT_S, assert_same, assert_same_steps, assert_same_weights
from integration.two_ranks import CASES, RESUMED, build, resume, save_models, spec_of, take_steps
from transformers import AutoModelForCausalLM

from headwater.models.builtin.tiny import Preset, build_config
from headwater.models.load import load_tokenizer, save_model

THREE_HEADS = Preset("qwen3", hidden_size=32, intermediate_size=32, num_layers=1, num_heads=3, num_kv_heads=3)
NUMBERS = ("loss", "grad_norm", "entropy", "approx_kl", "ratio_p50", "optimizer_steps")


def compare(folder, num_ranks: int, num_context: int, names: tuple[str, ...]) -> None:
    save_models(folder, names)
    save_model(
        AutoModelForCausalLM.from_config(build_config(THREE_HEADS)),
        load_tokenizer("tiny:qwen3"),
        folder / "three_heads",
    )
    alone = {
        name: take_steps(build(spec_of(CASES[name], folder)), CASES[name], folder / "alone" / name) for name in names
    }
    script = (context_ranks.__file__, folder, num_ranks, num_context, *names)
    done = forked.run(*script, env=environment_of_ranks(), timeout=LIMIT_S)
    assert (folder / "results.pt").exists(), done.stderr[-3000:]
    together = torch.load(folder / "results.pt", weights_only=False)
    for name in names:
        if name not in COARSE:
            assert_same(together["taken"][name]["computed"], alone[name]["computed"], name)
        assert_same_steps(together["taken"][name], alone[name], name, NUMBERS)
        assert together["taken"][name]["status"].num_ranks == num_ranks
        held = [each["held"] for each in together["held"][name]]
        assert sum(held) == together["held"][name][0]["all"], "every parameter is held once"
        assert max(held) < 1.2 * sum(held) / num_ranks, name
        compare_tokens(together["tokens"][name], num_context, name)
        assert together["limits"][name] == [{context_ranks.RANK_TIMEOUT_S}] * num_ranks, "learner.rank_timeout_s"
    assert set(together["resumed"]) == (set(RESUMED) & set(names) if num_ranks > 2 else set())
    for name in together["resumed"]:
        restored, weights = together["resumed"][name]
        assert restored == alone[name]["saved"], f"{name}, from one rank"
        assert_same_weights(weights, alone[name]["weights"], f"{name}, from one rank")
        restored, weights = resume(build(spec_of(CASES[name], folder)), CASES[name], folder / "together" / name)
        assert restored == together["taken"][name]["saved"], f"{name}, on one rank"
        assert_same_weights(weights, together["taken"][name]["weights"], f"{name}, on one rank")
    assert f"learner.context_parallel = 3: the learner has {num_ranks} ranks" in together["uneven"]
    if num_context == 2:
        assert "model has 3 attention heads, which must be divisible by it; use one of [1, 3]" in together["heads"]


def compare_tokens(of_ranks, num_context: int, name: str) -> None:
    for first in range(0, len(of_ranks), num_context):
        neighbours = of_ranks[first : first + num_context]
        assert all(
            {in_pack for in_pack, _ in passes} == {neighbours[0][place][0]}
            for place, passes in enumerate(zip(*neighbours, strict=True))
        ), f"{name}: neighbours compute the same packs"
    for passes in of_ranks:
        assert passes, name
        for in_pack, in_layer in passes:
            assert in_layer == -(-in_pack // num_context), f"{name}: {in_layer} of {in_pack} tokens"


def test_two_ranks_that_share_every_pack_train_what_one_does(tmp_path):
    compare(tmp_path, 2, 2, ("critic and reference",))


@pytest.mark.slow
def test_two_pairs_of_ranks_train_what_one_does(tmp_path):
    compare(tmp_path, 4, 2, tuple(CASES))


@pytest.mark.slow
def test_more_ranks_than_heads_of_keys(tmp_path):
    compare(tmp_path, 4, 4, ("plain", "checkpointed, by sequence"))
