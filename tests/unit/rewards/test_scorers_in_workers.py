"""The scorers that start processes, called as in a run: by the reward manager, in worker processes."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest
import tiny
from sandbox_here import skip_without_sandbox

from headwater.config.rollout_schema import RewardConfig, SandboxConfig
from headwater.core.errors import RewardFailed
from headwater.core.records import Answer
from headwater.observe.spans import Spans
from headwater.rewards.managers.naive import NaiveRewardManager


def ended(data_source: str, text: str, ground_truth: object) -> Answer:
    """An episode that has ended with ``text``."""
    return Answer(replace(tiny.prompt(uid="row"), data_source=data_source, ground_truth=ground_truth), text)


def test_mathematics_and_programs_in_one_run():
    skip_without_sandbox()
    asserts = ["assert f(2) == 4"]
    sandbox = SandboxConfig(memory_mib=64, timeout_s=20.0)
    # Workers have a low priority, and these start processes: on a busy machine that may take a while.
    config = RewardConfig(workers=1, timeout_s=600.0)
    with closing(NaiveRewardManager(config, Spans(), sandbox=sandbox)) as manager:

        async def score_all():
            return await asyncio.gather(
                manager.score(ended("lighteval/MATH", r"\boxed{\frac{2}{4}}", "0.5")),
                manager.score(ended("aime_2024", "Answer: 5", "7")),
                manager.score(ended("mbpp", "def f(x):\n    return 2 * x", asserts)),
                # More memory than the recipe allows: the settings of the section sandbox arrive in the worker.
                manager.score(ended("mbpp", "x = bytearray(100 << 20)\ndef f(x):\n    return 2 * x", asserts)),
                manager.score(ended("numina_olympiads", "\\boxed{9^{9^{9^9}}}", "5")),
            )

        half, aime, right, large, endless = asyncio.run(score_all())
    assert (half.value, aime.value, right.value, large.value, endless.value) == (1.0, -1.0, 1.0, 0.0, 0.0)
    assert (endless.info["verdict"], endless.info["unverified"]) == ("timed_out", 1.0)
    assert large.info["verdict"] in ("out_of_memory", "error")


def test_a_row_without_tests_is_a_failed_reward_with_the_row():
    message = r"reward code on row row \(data_source 'apps'\).*has no unit tests"
    with (
        closing(NaiveRewardManager(RewardConfig(workers=1), Spans())) as manager,
        pytest.raises(RewardFailed, match=message),
    ):
        asyncio.run(manager.score(ended("apps", "print(1)", None)))
