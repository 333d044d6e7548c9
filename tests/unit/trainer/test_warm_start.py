"""The supervised start."""

from __future__ import annotations

import pytest
import tiny

from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, Config, LearnerConfig, WarmStartConfig
from headwater.core.errors import DataError
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.learner import LocalLearner
from headwater.learner.packed_module import PolicyModule
from headwater.observe.progress import Display
from headwater.trainer.warm_start import demonstration, warm_start


def run(rewards, dataset, schedule="constant", **settings):
    asked = iter(rewards)
    config = WarmStartConfig(**{"num_steps": 30, "num_sequences_per_step": 4, **settings})
    engine = TrainEngine(PolicyModule(tiny.model(), 1.0), LearnerConfig(schedule=schedule), num_decay_steps=9)
    return warm_start(
        config,
        LocalLearner(Config(warm_start=config), Actor(engine, ppo, AlgorithmConfig(), loss_width=8), tiny.tokenizer()),
        tiny.tokenizer(),
        dataset,
        seed=0,
        template_args={},
        sampled_reward=lambda: next(asked),
        display=Display(),
    )


ROWS = [tiny.prompt(f"{n}+1=", uid=f"row{n}", extra_info={"demonstration": str(n + 1)}) for n in range(8)]


def test_the_likelihood_of_demonstrations_rises():
    assert run([], ROWS, num_steps=25).loss < 0.5 * run([], ROWS, num_steps=1).loss


@pytest.mark.parametrize("schedule", ["linear", pytest.param("cosine", marks=pytest.mark.slow)])
def test_the_schedule_of_the_run_is_not_the_start_s(schedule):
    assert run([], ROWS, schedule, num_steps=25).loss == run([], ROWS, num_steps=25).loss


def test_it_stops_once_the_sampled_reward_is_reached():
    assert run([0.1, 0.3], ROWS, until_reward=0.25).num_steps == 20
    assert run([0.1, 0.1, 0.1], ROWS, until_reward=0.25).num_steps == 30


def test_a_demonstration_may_be_a_conversation():
    shown = [
        {"role": "assistant", "content": "<tool_call>{}</tool_call>"},
        {"role": "tool", "content": "46"},
        {"role": "assistant", "content": "46"},
    ]
    made = demonstration(tiny.prompt(extra_info={"demonstration": shown}), tiny.tokenizer(), {})
    text = "".join(tiny.tokenizer().decode(made.response_tokens))
    assert text == "<tool_call>{}</tool_call><|end|><|tool|>46<|end|><|assistant|>46<|end|>"
    trained = [token for token, mask in zip(made.tokens, made.loss_mask, strict=True) if mask]
    assert tiny.tokenizer().decode(trained) == "<tool_call>{}</tool_call><|end|>46<|end|>"
    for wrong in (shown[1:], [*shown[:1], "46"], shown[:2]):
        with pytest.raises(DataError, match=r"row row: .*extra_info\.demonstration"):
            demonstration(tiny.prompt(extra_info={"demonstration": wrong}), tiny.tokenizer(), {})


def test_a_row_without_demonstration_says_what_to_do():
    with pytest.raises(DataError, match=r"row bare: no extra_info\.demonstration.*warm_start\.num_steps=0"):
        run([], [tiny.prompt(uid="bare")])
