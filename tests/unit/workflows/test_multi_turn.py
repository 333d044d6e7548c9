"""Retry with feedback: what the model reads, what it learns from, and what its answers are worth."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workflows import pictures
from workflows.episodes import END, FEEDBACK, ListedRewards, encode, run_multi_turn
from workflows.scripted_engine import ScriptedEngine

from headwater.config.schema import EngineConfig
from headwater.core.errors import ConfigError, RewardFailed, RolloutFailed
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Prompt
from headwater.core.requests import ModelResponse, SamplingParams, derive_key
from headwater.engine.engine import Engine
from headwater.models.load import load_tokenizer
from headwater.workflows import WORKFLOWS, Episode, WorkflowContext
from headwater.workflows.multi_turn import MultiTurnWorkflow

PROMPT = "<|user|>12+34=<|end|><|assistant|>"
RETRY = f"<|user|>{FEEDBACK}<|end|><|assistant|>"


def answer(text: str) -> tuple[int, ...]:
    return (*encode(text), END)


def test_its_name_is_multi_turn():
    assert WORKFLOWS.resolve("multi_turn") is MultiTurnWorkflow


def test_every_token_is_where_the_model_saw_it():
    engine = ScriptedEngine([answer("45"), answer("46")], END, version=4)
    trajectory = run_multi_turn(engine, ListedRewards([0.0, 1.0]))
    first, retry, second = answer("45"), encode(RETRY), answer("46")
    assert trajectory.tokens == encode(PROMPT) + first + retry + second
    assert trajectory.prompt_length == len(encode(PROMPT))
    lengths = [len(encode(PROMPT)), len(first), len(retry), len(second)]
    assert trajectory.loss_mask == tuple(mask for mask, n in zip((0, 1, 0, 1), lengths, strict=True) for _ in range(n))
    assert trajectory.versions == tuple(v for v, n in zip((-1, 4, -1, 5), lengths, strict=True) for _ in range(n))
    assert [logprob for logprob in trajectory.logprobs if logprob] == [-0.5, -0.51, -0.52, -1.5, -1.51, -1.52]
    assert all(
        bool(logprob) == bool(mask) for logprob, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True)
    )
    assert engine.requests[1].input_tokens == encode(PROMPT) + first + retry


def test_sampled_tokens_stay_as_they_were_sampled():
    # As text this is "the", which the tokenizer writes as fewer tokens; the model wrote it letter by letter.
    letters = tuple(token for letter in "the" for token in encode(letter))
    assert encode("the") != letters
    trajectory = run_multi_turn(ScriptedEngine([(*letters, END), answer("46")], END), ListedRewards([0.0, 1.0]))
    start = trajectory.prompt_length
    assert trajectory.tokens[start : start + 4] == (*letters, END)


def test_an_answer_that_was_cut_off_is_ended_by_a_token_that_is_not_trained():
    engine = ScriptedEngine([encode("123456789"), answer("46")], END)
    trajectory = run_multi_turn(engine, ListedRewards([0.0, 1.0]), max_turn_tokens=5)
    start = trajectory.prompt_length
    assert trajectory.tokens[start:] == (*encode("12345"), END, *encode(RETRY), *answer("46"))
    assert trajectory.loss_mask[start : start + 6] == (1, 1, 1, 1, 1, 0)
    assert trajectory.stop_reason == "stop"


def test_each_turn_is_a_request_of_its_own():
    engine = ScriptedEngine([answer("1"), answer("2"), answer("3")], END)
    run_multi_turn(engine, ListedRewards([0.0, 0.0, 0.0]))
    assert [each.request_id for each in engine.requests] == ["row#2/0", "row#2/1", "row#2/2"]
    assert [each.rng_key for each in engine.requests] == [derive_key(7, "turn", turn) for turn in range(3)]
    again = ScriptedEngine([answer("1"), answer("2"), answer("3")], END)
    run_multi_turn(again, ListedRewards([0.0, 0.0, 0.0]))
    assert again.requests == engine.requests


WORTH = [
    ([1.0], 1, 1.0),
    ([0.0, 1.0], 2, 0.5),
    ([0.2, 0.4, 0.8], 3, 0.2),
    ([0.0, 0.0, -1.0], 3, -0.25),
    ([0.7, 0.9], 2, 0.45),
]


def test_later_answers_are_worth_less():
    for scores, num_turns, reward in WORTH:
        check_worth(scores, num_turns, reward)


def check_worth(scores, num_turns, reward):
    engine = ScriptedEngine([answer(str(turn)) for turn in range(3)], END)
    trajectory = run_multi_turn(
        engine, ListedRewards(scores), turn_discount=0.5, stop_reward=0.9 if 0.9 in scores else 1.0
    )
    assert trajectory.reward == pytest.approx(reward)
    assert trajectory.turn_rewards == (0.0,) * (num_turns - 1) + (trajectory.reward,)
    assert trajectory.info == {
        "scored": num_turns, "response_text": str(num_turns - 1), "num_turns": num_turns, "first_reward": scores[0],
    }  # fmt: skip
    assert len(engine.requests) == num_turns


def test_the_reward_reads_each_answer_without_its_end_token():
    rewards = ListedRewards([0.0, 0.0, 1.0])
    run_multi_turn(ScriptedEngine([answer("45"), answer(" 47"), answer("46")], END), rewards)
    assert rewards.texts == ["45", " 47", "46"]


def test_one_turn_is_a_single_answer():
    engine = ScriptedEngine([answer("45")], END)
    trajectory = run_multi_turn(engine, ListedRewards([0.25]), max_turns=1)
    assert trajectory.tokens == encode(PROMPT) + answer("45")
    assert (trajectory.reward, trajectory.turn_rewards, trajectory.stop_reason) == (0.25, (0.25,), "stop")


@pytest.mark.parametrize("spare", [0, 1])
def test_without_room_for_another_answer_the_episode_ends_by_length(spare):
    room = len(answer("45")) + len(encode(RETRY)) + spare
    engine = ScriptedEngine([answer("45"), answer("46")], END)
    trajectory = run_multi_turn(engine, ListedRewards([0.5, 0.5]), max_new_tokens=room, max_turns=2)
    assert len(engine.requests) == 1 + spare
    assert trajectory.stop_reason == "length"
    assert len(trajectory.response_tokens) == (room if spare else len(answer("45")))
    assert trajectory.reward == 0.5 * 0.9**spare


def test_a_reward_that_raises_ends_the_episode():
    with pytest.raises(RewardFailed, match="no judge"):
        run_multi_turn(
            ScriptedEngine([answer("45"), answer("46")], END), ListedRewards([0.0, RewardFailed("no judge")])
        )


def test_an_aborted_answer_is_a_failure_and_no_wrong_answer():
    class Aborting:
        async def agenerate(self, request):
            return ModelResponse(request.input_tokens, (5,), (-1.0,), (0,), "abort")

    with pytest.raises(RolloutFailed, match="row#2/0: the engine aborted it"):
        run_multi_turn(Aborting(), ListedRewards([]))


def test_pictures_are_sent_in_every_turn_and_refused_by_a_text_model():
    prompt = pictures.prompt(pictures.content("red"))
    episode = pictures.episode_of(pictures.answer("45"), pictures.answer("46"), shown=prompt, rewards=[0.0, 1.0])
    made = asyncio.run(MultiTurnWorkflow(episode.context).run(episode))
    assert [request.media for request in episode.engine.requests] == [prompt.media] * 2
    assert (made.media, made.reward) == (prompt.media, 0.9)
    with pytest.raises(RolloutFailed, match="has images or videos, but the model takes only text"):
        run_multi_turn(ScriptedEngine([], END), ListedRewards([]), prompt)


BAD_SETTINGS = [
    ({"max_turns": 0}, "max_turns = 0: must be >= 1"),
    ({"turn_discount": 1.5}, "turn_discount = 1.5: must be in"),
    ({"feedback": " "}, "feedback is empty"),
    ({"max_turn_tokens": -1}, "max_turn_tokens = -1: must be >= 0"),
]


def test_settings_that_make_no_sense_are_refused():
    for setting, message in BAD_SETTINGS:
        with pytest.raises(ConfigError, match=f"rollout.workflow_args.{message}"):
            run_multi_turn(ScriptedEngine([], END), ListedRewards([]), **setting)


answers = st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    answers=answers,
    scores=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=5, max_size=5),
    max_new_tokens=st.integers(1, 90),
    max_turn_tokens=st.integers(0, 9),
    token=st.integers(6, 511),
)
def test_any_episode_adds_up(answers, scores, max_new_tokens, max_turn_tokens, token):
    script = [(token,) * length + (END,) * ends or (token,) for length, ends in answers]
    engine = ScriptedEngine(script, END)
    trajectory = run_multi_turn(
        engine,
        ListedRewards(scores),
        max_turns=len(script),
        max_new_tokens=max_new_tokens,
        max_turn_tokens=max_turn_tokens,
    )
    num_turns = trajectory.info["num_turns"]
    assert len(engine.requests) == num_turns <= len(script)
    assert len(trajectory.response_tokens) <= max_new_tokens
    # Each request saw exactly what stands before its response, and its response is the next run of trained tokens.
    runs = [
        (trained, [index for index, _ in run])
        for trained, run in itertools.groupby(enumerate(trajectory.loss_mask), key=lambda pair: pair[1])
    ]
    trained_runs = [indices for trained, indices in runs if trained]
    assert len(trained_runs) == num_turns == len(trajectory.turn_rewards)
    for request, indices, written in zip(engine.requests, trained_runs, script, strict=False):
        assert request.input_tokens == trajectory.tokens[: indices[0]]
        assert tuple(trajectory.tokens[index] for index in indices) == written[: request.sampling.max_new_tokens]
    for mask, version, logprob in zip(trajectory.loss_mask, trajectory.versions, trajectory.logprobs, strict=True):
        assert (version == -1, logprob == 0.0) == ((False, False) if mask else (True, True))
    assert sum(trajectory.turn_rewards) == trajectory.reward
    assert trajectory.reward == pytest.approx(0.9 ** (num_turns - 1) * scores[num_turns - 1])
    if num_turns < len(script) and scores[num_turns - 1] < 1.0:
        assert trajectory.stop_reason == "length"
    # Every answer is closed once before the next message: by the model, or by the template.
    ends = [trajectory.tokens[start - 1] for start in _starts_of_feedback(trajectory)]
    assert all(end == END for end in ends)


def _starts_of_feedback(trajectory) -> list[int]:
    (user,) = encode("<|user|>")
    return [i for i, token in enumerate(trajectory.tokens) if token == user and i >= trajectory.prompt_length]


def test_a_real_engine_sees_the_conversation_token_by_token():
    """Recorded log-probs are those of one forward pass over the trajectory: what it learns from is what it saw."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    engine = Engine(tiny.model(), tokenizer, EngineConfig(max_sequences=8))

    async def episodes():
        context = WorkflowContext(tokenizer, ListedRewards([0.0] * 12), SamplingParams(max_new_tokens=90))
        workflow = MultiTurnWorkflow(context, feedback=FEEDBACK, max_turn_tokens=12)
        inputs = [EpisodeInput(tiny.prompt(), sample, rng_key=sample) for sample in range(4)]
        return await asyncio.gather(*(workflow.run(Episode(context, engine, each)) for each in inputs))

    try:
        trajectories = asyncio.run(episodes())
    finally:
        engine.close()
    assert len({each.tokens for each in trajectories}) == 4
    for each in trajectories:
        assert each.info["num_turns"] == 3
        with torch.no_grad():
            logprobs = model(torch.tensor([each.tokens])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(each.tokens)[1:, None])[:, 0]
        trained = torch.tensor(each.loss_mask)[1:].bool()
        recorded = torch.tensor(each.logprobs)[1:]
        torch.testing.assert_close(recorded[trained], expected[trained], atol=1e-4, rtol=1e-4)


def test_template_arguments_reach_the_feedback():
    tokenizer = load_tokenizer("tiny:qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        '{{- before ~ "assistant" ~ after -}}', '{{- before ~ "assistant" ~ after ~ (opening or "") -}}'
    )
    messages = ({"role": "user", "content": "12+34="},)
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, opening="So: ")
    prompt = Prompt("row", messages, text, tuple(tokenizer.encode(text)), "arithmetic")
    engine = ScriptedEngine([answer("45"), answer("46")], END)
    context = WorkflowContext(
        tokenizer, ListedRewards([0.0, 1.0]), SamplingParams(max_new_tokens=100), {"opening": "So: "}
    )
    asyncio.run(MultiTurnWorkflow(context).run(Episode(context, engine, EpisodeInput(prompt, 0, 0))))
    assert text.endswith("<|assistant|>So: ")
    assert tokenizer.decode(engine.requests[1].input_tokens).endswith("<|assistant|>So: ")
