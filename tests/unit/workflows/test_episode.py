"""An episode records what the model saw and wrote, and turns it into trajectories."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import tiny
from workflows.episodes import END, ListedRewards, encode
from workflows.scripted_engine import ScriptedEngine

from headwater.core.errors import ConfigError, RolloutFailed
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Answer, Score
from headwater.core.requests import ModelResponse, SamplingParams, derive_key
from headwater.workflows import WORKFLOWS, Episode, WorkflowContext, make_runner

TELL = [{"role": "user", "content": "Again."}]
BETWEEN = "<|user|>Again.<|end|><|assistant|>"


def answer(text: str) -> tuple[int, ...]:
    return (*encode(text), END)


def episode_of(*answers: tuple[int, ...], rewards=(), max_new_tokens: int = 100, **fields) -> Episode:
    engine = ScriptedEngine(answers, END, version=3)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_strings=("#",))
    context = WorkflowContext(tiny.tokenizer(), ListedRewards(rewards), sampling)
    return Episode(context, engine, EpisodeInput(tiny.prompt(**fields), sample=1, rng_key=7))


def test_replies_are_trained_and_everything_else_is_not():
    async def run(episode):
        assert (episode.text, episode.num_turns, episode.room, episode.tokens) == ("", 0, 100, episode.prompt.tokens)
        assert await episode.reply() == "45"
        assert episode.tell(TELL)
        assert await episode.reply(max_tokens=1, stop=("!",)) == "4"
        return episode.finish(Score(0.5, {"a": 1}), turn_scores=[0.0, 0.5], info={"b": 2})

    episode = episode_of(answer("45"), answer("46"))
    made = asyncio.run(run(episode))
    first, between, second = answer("45"), encode(BETWEEN), encode("4")
    before = len(episode.prompt.tokens)
    assert (made.uid, made.sample, made.prompt_length, made.stop_reason) == ("row", 1, before, "length")
    assert made.response_tokens == first + between + second == episode.tokens[before:]
    assert made.loss_mask[before:] == (1,) * len(first) + (0,) * len(between) + (1,)
    assert made.versions[before:] == (3,) * len(first) + (-1,) * len(between) + (4,)
    assert made.logprobs[before:] == (-0.5, -0.51, -0.52, *(0.0,) * len(between), -1.5)
    assert (made.reward, made.turn_rewards) == (0.5, (0.0, 0.5))
    assert made.info == {"a": 1, "response_text": "4", "b": 2}
    assert episode.messages == (
        {"role": "user", "content": "12+34="},
        {"role": "assistant", "content": "45"},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "4"},
    )
    assert made.messages == episode.messages
    assert (episode.num_turns, episode.room) == (2, 100 - len(made.response_tokens))


def test_requests_have_names_keys_and_limits():
    async def run(episode):
        await episode.reply()
        episode.tell(TELL)
        await episode.reply(max_tokens=5, stop=("!",))
        episode.tell(TELL)
        await episode.reply(turn=9)

    episode = episode_of(*[answer("1")] * 3)
    asyncio.run(run(episode))
    asked = episode.engine.requests
    assert [each.request_id for each in asked] == ["row#1", "row#1/1", "row#1/9"]
    assert [each.rng_key for each in asked] == [7, derive_key(7, "turn", 1), derive_key(7, "turn", 9)]
    assert [each.sampling.stop_strings for each in asked] == [("#",), ("#", "!"), ("#",)]
    assert asked[0].sampling == episode.context.sampling
    assert asked[1].sampling.max_new_tokens == 5


def test_without_tell_the_model_continues_its_message():
    async def run(episode):
        assert await episode.reply(max_tokens=1) == "4"
        assert await episode.reply() == "46"
        return episode.finish(1.0, turn_scores=[1.0])

    episode = episode_of(encode("4"), answer("6"))
    made = asyncio.run(run(episode))
    assert made.response_tokens == (*encode("4"), *encode("6"), END)
    assert (episode.num_turns, episode.messages[1:]) == (1, ({"role": "assistant", "content": "46"},))


@pytest.mark.parametrize("spare", [0, 1])
def test_tell_needs_room_for_one_more_token(spare):
    async def run(episode):
        await episode.reply()
        return episode.tell(TELL)

    episode = episode_of(answer("45"), max_new_tokens=len(answer("45")) + len(encode(BETWEEN)) + spare)
    assert asyncio.run(run(episode)) == bool(spare)
    assert episode.stop_reason == ("stop" if spare else "length")
    assert len(episode.messages) == 2 + spare


def test_the_run_s_reward_sees_the_whole_conversation():
    async def run(episode):
        await episode.reply()
        return await episode.score()

    episode = episode_of(answer("45"), rewards=[0.25])
    assert asyncio.run(run(episode)) == Score(0.25, {"scored": 1})
    assert Answer(episode.prompt, "45").messages == episode.messages


def test_pieces_have_separate_randomness_and_one_sample_number():
    async def run(episode):
        await episode.reply()
        copy = episode.branch()
        assert copy.tell(TELL)
        await copy.reply()
        other = episode.branch([{"role": "user", "content": "A summary, then 12+34="}])
        await other.reply()
        return [each.finish(1.0) for each in (episode, copy, other)]

    episode = episode_of(answer("1"), answer("2"), answer("3"))
    whole, copied, other = asyncio.run(run(episode))
    assert {each.sample for each in (whole, copied, other)} == {1}
    assert whole.response_tokens == answer("1")
    assert copied.response_tokens == (*answer("1"), *encode(BETWEEN), *answer("2"))
    assert other.tokens == (*encode("<|user|>A summary, then 12+34=<|end|><|assistant|>"), *answer("3"))
    assert sum(other.loss_mask) == len(answer("3"))
    asked = episode.engine.requests
    assert [each.request_id for each in asked] == ["row#1", "row#1.0", "row#1.1"]
    assert [each.rng_key for each in asked[1:]] == [derive_key(7, "branch", number) for number in range(2)]
    # A longer prompt must not make the sequence longer than the run's limits allow.
    assert asked[2].sampling.max_new_tokens == 100 - (other.prompt_length - len(episode.prompt.tokens))


def test_each_piece_keeps_its_own_conversation():
    async def run(episode):
        await episode.reply()
        other = episode.branch([{"role": "user", "content": "A summary."}])
        await other.reply()
        return episode.finish(1.0), other.finish(1.0)

    whole, other = asyncio.run(run(episode_of(answer("1"), answer("2"))))
    assert [each["content"] for each in whole.messages] == ["12+34=", "1"]
    assert [each["content"] for each in other.messages] == ["A summary.", "2"]


CALL = {"function": {"name": "add", "arguments": {"a": 12, "b": 34}}}
RESULT = [{"role": "tool", "content": "46"}]


def test_tool_calls_are_part_of_the_conversation_but_not_written_twice():
    async def run(episode):
        assert await episode.reply() == "Let me add.add"
        # The tiny tokenizer has no special marker of calls, so another special token stands for one.
        assert episode.raw_text == "Let me add.<|system|>add"
        assert episode.tell(RESULT, tool_calls=[CALL], content="Let me add.")
        assert episode.raw_text == "Let me add.<|system|>add"
        await episode.reply()
        return episode.finish(1.0)

    written = (*encode("Let me add.<|system|>add"), END)
    episode = episode_of(written, answer("46"))
    made = asyncio.run(run(episode))
    between = encode("<|tool|>46<|end|><|assistant|>")
    assert made.response_tokens == (*written, *between, *answer("46"))
    assert sum(made.loss_mask) == len(written) + len(answer("46"))
    assert made.messages[1:] == (
        {"role": "assistant", "content": "Let me add.", "tool_calls": [CALL]},
        *RESULT,
        {"role": "assistant", "content": "46"},
    )


def test_the_raw_text_of_a_reply_that_was_cut_off_keeps_its_last_token():
    episode = episode_of(encode("4<|system|>"))
    assert episode.raw_text == ""
    assert asyncio.run(episode.reply(max_tokens=2)) == "4"
    assert episode.raw_text == "4<|system|>"


class Answers:
    def __init__(self, response: ModelResponse) -> None:
        self.response = response

    async def agenerate(self, request):
        return self.response


def replaced_messages(episode: Episode, *messages) -> Episode:
    prompt = replace(episode.prompt, messages=messages)
    return Episode(episode.context, episode.engine, replace(episode.data, prompt=prompt))


def test_half_answers_other_tokens_audio_and_misuse_are_refused():
    episode = episode_of()
    episode.engine = Answers(ModelResponse(episode.tokens, (5,), (-1.0,), (0,), "abort"))
    with pytest.raises(RolloutFailed, match="request row#1: the engine aborted it"):
        asyncio.run(episode.reply())
    episode.engine = Answers(ModelResponse((9, 9), (5,), (-1.0,), (0,), "stop"))
    with pytest.raises(RolloutFailed, match="answered for 2 other input tokens"):
        asyncio.run(episode.reply())
    with pytest.raises(ValueError, match="must follow a reply"):
        episode.tell(TELL)
    heard = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "audio", "url": "a.wav"}]}
    with pytest.raises(RolloutFailed, match="its prompt has message parts of type audio, which the model does"):
        asyncio.run(replaced_messages(episode_of(), heard).reply())
    shown = episode_of(answer("45"))
    asyncio.run(shown.reply())
    for add, name in ((shown.tell, "tell"), (shown.branch, "branch")):
        with pytest.raises(RolloutFailed, match=rf"{name}\(\) was given message parts of type audio"):
            add([heard])
    assert shown.tell([{"role": "user", "content": [{"type": "text", "text": "Again."}]}])
    full = episode_of(encode("45"), max_new_tokens=2)
    asyncio.run(full.reply())
    with pytest.raises(RolloutFailed, match="no room for another reply"):
        asyncio.run(full.reply())


# What rollout.workflow may name


class Engineer:
    """As AReaL's workflows are: it talks to the engine itself."""

    def __init__(self, context, *, bonus: float = 0.0) -> None:
        self.bonus = bonus

    async def arun_episode(self, engine, data):
        return (data.sample, self.bonus, engine)


class Useless:
    def __init__(self, context) -> None:
        pass


async def plain(episode, *, bonus: float = 0.0):
    await episode.reply()
    return episode.finish(bonus)


def test_classes_functions_and_areal_s_classes_are_workflows():
    episode = episode_of(answer("1"), answer("2"), rewards=[0.5])

    def make(thing, **arguments):
        return lambda *given: thing(*given, **arguments)

    def run(runner):
        return asyncio.run(runner.workflow.run(Episode(runner.context, episode.engine, episode.data)))

    here = __name__
    runner = make_runner(f"{here}:Engineer", make(Engineer, bonus=2.0), episode.context)
    assert (runner.name, run(runner)) == ("Engineer", (1, 2.0, episode.engine))
    runner = make_runner(f"{here}:plain", make(plain, bonus=3.0), episode.context)
    assert (runner.name, run(runner).reward) == ("plain", 3.0)
    runner = make_runner("rlvr", WORKFLOWS.resolve("rlvr"), episode.context)
    assert run(runner).info == {"scored": 1, "response_text": "2"}
    with pytest.raises(ConfigError, match="a Useless is not a workflow; name a class with 'async def run"):
        make_runner(f"{here}:Useless", Useless, episode.context)


def test_only_files_that_register_a_workflow_are_names():
    assert WORKFLOWS.names() == ["endpoint", "multi_turn", "rlvr", "tool_agent"]
