"""Records, registry, randomness and waits."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from patience import long_enough

from headwater.core.errors import HeadwaterError, UnknownName, WaitTimeout
from headwater.core.records import Prompt, Score, Trajectory
from headwater.core.registry import Registry, blaming, load_object
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams, derive_key
from headwater.core.waits import named_wait

GOOD = {
    "uid": "row", "sample": 0, "tokens": (1, 2, 3), "prompt_length": 1, "loss_mask": (0, 1, 1),
    "logprobs": (0.0, -1.0, -2.0), "versions": (-1, 0, 0), "reward": 1.0, "stop_reason": "stop",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", (1, 2), "lengths 2, 3, 3, 3; must be equal"),
        ("prompt_length", 0, r"prompt_length = 0, must be in 1\.\.3"),
        ("prompt_length", 4, r"prompt_length = 4, must be in 1\.\.3"),
        ("loss_mask", (1, 1, 1), "loss_mask is set inside the prompt"),
        ("loss_mask", (0, 2, 1), "values other than 0 and 1"),
        ("versions", (-1, -1, 0), "a trained token has no policy version"),
        ("reward", float("nan"), "reward = nan: must be a finite number"),
        ("turn_rewards", (0.5, 0.5), "2 turn_rewards for 1 turns"),
        ("turn_rewards", (0.5,), "turn_rewards sum to 0.5, must sum to reward = 1.0"),
        ("turn_rewards", (float("nan"),), "reward = nan: must be a finite number"),
        ("reward", 1e308, r"reward = 1e\+308: must be a finite number within ±1e\+15"),
        ("turn_rewards", (-1e308,), "within ±1e"),
    ],
)
def test_an_inconsistent_trajectory_cannot_be_made(field, value, message):
    Trajectory(**GOOD)
    with pytest.raises(ValueError, match=message):
        Trajectory(**{**GOOD, field: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"min_p": 1.0}, "min_p = 1.0"),
        ({"min_new_tokens": 9}, "min_new_tokens = 9"),
    ],
)
def test_wrong_sampling_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_new_tokens": 8, **settings})


def test_other_records_check_themselves():
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs and 2 versions"):
        ModelResponse((1,), (2, 3), (-0.1,), (0, 0), "stop")
    with pytest.raises(ValueError, match="empty prompt"):
        ModelRequest("r", (), SamplingParams(1), 0)
    with pytest.raises(ValueError, match="has no tokens"):
        Prompt("row", (), "", (), "source")
    with pytest.raises(ValueError, match="must be a finite number"):
        Score(float("inf"))


def test_keys_depend_on_every_part():
    keys = {derive_key(0, "ab", "c"), derive_key(0, "a", "bc"), derive_key(1, "ab", "c"), derive_key("0ab", "c")}
    assert len(keys) == 4
    assert derive_key(0, "rollout", "row", 3) == 2519418013276764966
    assert all(-(2**63) <= derive_key(number) < 2**63 for number in range(100))


def test_names_are_files_and_paths_are_loaded(tmp_path):
    registry = Registry("advantage", "headwater.algorithms.advantages")
    assert {"gae", "grpo"} <= set(registry.names())
    with pytest.raises(UnknownName, match="unknown advantage 'grop'; did you mean 'grpo'"):
        registry.resolve("grop")
    file = tmp_path / "mine.py"
    file.write_text("class Thing: pass\n")
    assert registry.resolve(f"{file}:Thing") is load_object(f"{file}:Thing")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.module:Thing", "cannot import 'no.such.module'"),
        ("missing.py:Thing", "missing.py: no such file"),
        ("json:dupms", "has no 'dupms'; did you mean 'dumps'"),
        (":x", "write an extension as"),
    ],
)
def test_bad_extension_paths_are_named(path, message):
    with pytest.raises(UnknownName, match=message):
        load_object(path)


def test_what_a_file_imports_is_not_offered_as_its_own(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("from __future__ import annotations\nfrom math import sqrt\nfrom pathlib import Path\n"
                    "LIMIT = 3\ndef score(): ...\nclass Judge: ...\ndef _help(): ...\n")  # fmt: skip
    with pytest.raises(UnknownName, match=r"reward\.py has no 'nope'; known: score, Judge$"):
        load_object(f"{file}:nope")


def test_the_setting_that_asks_for_an_extension_is_blamed():
    blamed = r"^data\.dataset = missing\.py:Mine: .*missing\.py: no such file"
    with pytest.raises(UnknownName, match=blamed), blaming("data.dataset = missing.py:Mine"):
        load_object("missing.py:Mine")


def test_an_extension_that_does_not_import_says_why(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(HeadwaterError, match=r"broken\.py: failed to import: ZeroDivisionError"):
        load_object(f"{file}:Thing")


def test_a_wait_speaks_and_then_gives_up(caplog):
    async def forever():
        await asyncio.sleep(60)

    def check(limit_s):
        with pytest.raises(WaitTimeout, match=r"gave up after \d+ s: waiting for Godot"):
            asyncio.run(named_wait(forever(), lambda: "waiting for Godot", soft_limit_s=0.05, hard_limit_s=limit_s))
        assert re.search(r"still waiting after \d+ s: waiting for Godot", caplog.text)

    with caplog.at_level(logging.WARNING):
        long_enough(check, 0.2, 10.0)


def test_a_wait_passes_results_and_errors_on():
    async def answer():
        return 42

    async def fail():
        raise KeyError("inside")

    assert asyncio.run(named_wait(answer(), lambda: "", hard_limit_s=300)) == 42
    with pytest.raises(KeyError, match="inside"):
        asyncio.run(named_wait(fail(), lambda: "", hard_limit_s=300))
