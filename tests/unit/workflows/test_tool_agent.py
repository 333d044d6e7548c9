"""The model calls tools: what it reads and learns from, its limits, and what a failing tool does to an episode."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence

import pytest
import tiny
from workflows.episodes import END, ListedRewards, encode
from workflows.scripted_engine import ScriptedEngine

from headwater.chat.parsers import make_parser
from headwater.chat.render import encode_rendered, render_chat
from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.errors import ConfigError, RewardFailed, RolloutFailed
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Prompt
from headwater.core.requests import SamplingParams
from headwater.rollout.group import episode_metrics
from headwater.tools.base import BaseTool
from headwater.tools.toolbox import Toolbox
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.tool_agent import ToolAgentWorkflow, tell_results


class Counter(BaseTool):
    """Counts its calls in an episode. The reward of a call is its amount; that of the episode is 10."""

    tool_schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "count",
            "description": "Add to a counter.",
            "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]},
        },
    }

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.num_released = 0

    async def create(self, instance_id: str) -> str:
        self.totals[instance_id] = 0
        return instance_id

    async def execute(self, instance_id: str, parameters: dict) -> tuple[str, float, dict[str, float]]:
        self.totals[instance_id] += parameters["amount"]
        return f"total {self.totals[instance_id]}", float(parameters["amount"]), {"amount": parameters["amount"]}

    async def calc_reward(self, instance_id: str) -> float:
        return 10.0

    async def release(self, instance_id: str) -> None:
        del self.totals[instance_id]
        self.num_released += 1


gates: dict[str, asyncio.Event] = {}


async def meet(me: str, other: str) -> str:
    """Answer only when the other has been called too."""
    gates.setdefault(me, asyncio.Event()).set()
    await gates.setdefault(other, asyncio.Event()).wait()
    return f"{me} met {other}"


def broken() -> str:
    """Raise an error."""
    raise OSError("no such thing")


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said(text: str) -> tuple[int, ...]:
    return (*encode(text), END)


class Scene:
    """One toolbox, and episodes in which the model says what it is told to."""

    def __init__(
        self, *tools: object, rewards: Sequence[float | Exception] = (1.0,), max_new_tokens: int = 600
    ) -> None:
        self.counter = Counter()
        self.toolbox = Toolbox(ToolsConfig(), SandboxConfig(), tiny.tokenizer(), tools=[self.counter, *tools])
        parser = make_parser("auto", tiny.tokenizer())
        sampling = SamplingParams(max_new_tokens=max_new_tokens)
        self.context = WorkflowContext(
            tiny.tokenizer(), ListedRewards(rewards), sampling, tools=self.toolbox, parser=parser
        )

    def episode(self, *answers: str | tuple[int, ...]) -> Episode:
        schemas = tuple(self.toolbox.schemas(tiny.prompt()))
        messages = ({"role": "user", "content": "Go."},)
        text = render_chat(tiny.tokenizer(), messages, {"tools": list(schemas)})
        prompt = Prompt("row", messages, text, encode_rendered(tiny.tokenizer(), text), "x", tool_schemas=schemas)
        engine = ScriptedEngine([said(each) if isinstance(each, str) else each for each in answers], END, version=3)
        return Episode(self.context, engine, EpisodeInput(prompt, sample=1, rng_key=7))

    def run(self, *answers: str | tuple[int, ...], **settings):
        gates.clear()
        return asyncio.run(ToolAgentWorkflow(self.context, **settings).run(self.episode(*answers)))


def test_parallel_calls_run_together_and_their_results_are_in_order():
    first = "Let me see." + call("meet", me="a", other="b") + call("meet", me="b", other="a")
    scene = Scene(meet)
    made = scene.run(first, "Done.")
    between = encode("<|tool|>a met b<|end|><|tool|>b met a<|end|><|assistant|>")
    assert made.response_tokens == (*said(first), *between, *said("Done."))
    start = made.prompt_length
    trained = [token for token, mask in zip(made.tokens, made.loss_mask, strict=True) if mask]
    assert trained == [*said(first), *said("Done.")]
    assert made.versions[start:] == (3,) * len(said(first)) + (-1,) * len(between) + (4,) * len(said("Done."))
    assert (made.reward, made.stop_reason, made.turn_rewards) == (1.0, "stop", ())
    assert [message["role"] for message in made.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    asked = made.messages[1]
    assert asked["content"] == "Let me see."
    assert [each["function"]["arguments"]["me"] for each in asked["tool_calls"]] == ["a", "b"]
    assert [each["id"] for each in asked["tool_calls"]] == [each["tool_call_id"] for each in made.messages[2:4]]
    info = made.info
    assert (info["num_turns"], info["num_tool_calls"], info["ended_by"]) == (2, 2, "answer")
    assert (info["tool_calls"], info["tool_failures"], info["tool_rewards"]) == ({"meet": 2}, {}, {"count": 10.0})
    assert info["tool_s"] >= 0
    assert made.messages[0] == {"role": "user", "content": "Go."}
    assert made.tokens[:start] == encode(
        "<|system|>Tools:\ncount(amount)\nmeet(me, other)<|end|><|user|>Go.<|end|><|assistant|>"
    )


def test_what_goes_wrong_is_told_to_the_model_and_counted():
    bad = call("count", amount="many") + call("nothing") + call("broken") + "<tool_call>{oops</tool_call>"
    scene = Scene(broken, rewards=[1.0, 0.0])
    made = scene.run(bad, call("count", amount=2), "2")
    told = [message["content"] for message in made.messages if message["role"] == "tool"]
    assert all(each.startswith("Error: ") for each in told[:4])
    for text, part in zip(
        told, ("amount", "no tool 'nothing'", "OSError: no such thing", "could not be read"), strict=False
    ):
        assert part in text
    assert told[4] == "total 2"
    failures = {"bad_arguments": 1, "unknown_tool": 1, "raised": 1, "malformed": 1}
    assert made.info["tool_failures"] == failures
    assert (made.info["num_tool_calls"], made.info["num_turns"]) == (5, 3)
    metrics = episode_metrics([made, scene.run("No tools.")])
    assert (metrics["tools/calls"], metrics["tools/failed_fraction"], metrics["episode/turns"]) == (2.5, 0.8, 2.0)
    assert (metrics["tools/failures/malformed"], metrics["tools/failures/timed_out"]) == (0.5, 0.0)
    assert (metrics["tools/calls/count"], metrics["tools/count/amount"]) == (1.0, 2.0)
    assert metrics["episode/ended_by/answer"] == 1.0


def test_each_limit_ends_or_refuses_what_it_says():
    one, scene = call("count", amount=1), Scene(rewards=[1.0] * 20)
    made = scene.run(one, one, max_assistant_turns=2)
    assert (made.info["ended_by"], made.stop_reason, made.info["num_tool_calls"]) == (
        "assistant_turns",
        "tool_calls",
        1,
    )
    made = scene.run(one + one + one, "ok", max_calls_per_turn=2)
    told = [message["content"] for message in made.messages if message["role"] == "tool"]
    assert told == ["total 1", "total 2", "Error: not called, because the limit of 2 calls per message is reached."]
    assert (made.info["tool_failures"], made.info["ended_by"]) == ({"over_limit": 1}, "answer")
    made = scene.run(one * 6, one * 2, one * 2, "ok", max_calls=6, max_calls_per_turn=2)
    assert made.info["tool_failures"] == {"over_limit": 4}, "refused calls do not use up the limit"
    made = scene.run(one, one + one, one, "ok", max_calls=2)
    told = [message["content"] for message in made.messages if message["role"] == "tool"]
    refusal = "Error: not called, because the limit of 2 calls per conversation is reached."
    assert told == ["total 1", "total 2", refusal, refusal]
    made = scene.run("A very long answer.", max_turn_tokens=3)
    assert (made.info["ended_by"], made.stop_reason, len(made.response_tokens)) == ("turn_tokens", "length", 3)
    made = scene.run(one + "and so on", "ok", max_turn_tokens=len(encode(one)))
    assert (made.info["ended_by"], made.info["num_tool_calls"]) == ("answer", 1), (
        "a complete call in a cut reply counts"
    )
    assert (scene.counter.num_released, scene.counter.totals) == (6, {})
    for spare, ended_by in ((0, "room"), (1, "room"), (40, "answer")):
        small = Scene(max_new_tokens=len(said(one)) + spare)
        made = small.run(one, "ok")
        assert made.info["ended_by"] == ended_by
        assert made.stop_reason == ("stop" if spare == 40 else "length")
        assert made.info["num_tool_calls"] == (spare > 0), "without room for a result, nothing is called"
    cut = Scene(max_new_tokens=3).run("A very long answer.")
    assert (cut.info["ended_by"], cut.stop_reason) == ("room", "length")


USER = """
import threading

async def ask_again(messages, prompt):
    assert prompt.uid == "row"
    return None if messages[-1]["content"] == "enough" else "More."

def wrong(messages, prompt):
    return 5

def from_a_thread(messages, prompt):
    with open(prompt.uid + ".thread", "w") as file:
        file.write(threading.current_thread().name)
"""


def test_a_simulated_user_continues_the_conversation(tmp_path, monkeypatch):
    (tmp_path / "user.py").write_text(USER)
    user, scene = f"{tmp_path / 'user.py'}:ask_again", Scene(rewards=[1.0] * 4)
    made = scene.run("one", call("count", amount=1), "two", "enough", user=user)
    assert (made.info["ended_by"], made.info["num_user_turns"], made.info["num_turns"]) == ("answer", 2, 4)
    assert [message["role"] for message in made.messages[1:]] == [
        "assistant", "user", "assistant", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip
    made = scene.run("one", "two", user=user, max_user_turns=1)
    assert (made.info["ended_by"], made.info["num_user_turns"]) == ("user_turns", 1)
    made = scene.run("one", "two", user=user, max_assistant_turns=2)
    assert (made.info["ended_by"], made.info["num_user_turns"]) == ("answer", 1)
    with pytest.raises(RolloutFailed, match=r"workflow_args\.user: returned a int"):
        scene.run("one", user=f"{tmp_path / 'user.py'}:wrong")
    monkeypatch.chdir(tmp_path)
    scene.run("one", user=f"{tmp_path / 'user.py'}:from_a_thread")
    assert (tmp_path / "row.thread").read_text() != threading.current_thread().name


def test_rewards_of_tools_are_added_by_weight_and_per_turn():
    answers = (call("count", amount=2), call("count", amount=1) + call("count", amount=3), "ok")
    for settings, reward, turns in (
        ({}, 1.0, ()),
        ({"tool_reward_weight": 0.5}, 1.0 + 0.5 * (6 + 10), ()),
        ({"tool_reward_weight": 0.5, "tool_rewards_per_turn": True}, 9.0, (1.0, 2.0, 6.0)),
    ):
        made = Scene().run(*answers, **settings)
        assert (made.reward, made.turn_rewards) == (reward, turns)
        assert made.info["tool_rewards"] == {"count": 10.0}
        assert made.info["tool_metrics"] == {"count/amount": 2.0}
        assert made.info.get("score") == (1.0 if settings else None)


def test_tools_are_released_whatever_happens():
    scene = Scene(rewards=[RewardFailed("no")])
    with pytest.raises(RewardFailed):
        scene.run(call("count", amount=1), "ok")
    assert (scene.counter.num_released, scene.counter.totals) == (1, {})
    scene = Scene(meet)

    async def cancel() -> None:
        episode = scene.episode(call("count", amount=1), call("meet", me="a", other="nobody"))
        task = asyncio.ensure_future(ToolAgentWorkflow(scene.context).run(episode))
        while episode.data.state.now()[:2] != ("calling_tools", "calling meet"):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    gates.clear()
    asyncio.run(cancel())
    assert (scene.counter.num_released, scene.counter.totals) == (1, {})


def test_a_history_that_is_replaced_keeps_its_tools():
    """A custom workflow: after each result, the history is replaced by a summary. Every piece is a trajectory."""

    async def run(scene: Scene, episode: Episode):
        pieces, now = [], episode
        async with scene.toolbox.open(episode.prompt) as session:
            for _ in range(3):
                await now.reply()
                reply = scene.context.parser.parse(now.raw_text)
                pieces.append(now)
                if not reply.calls:
                    break
                with now.doing("calling count", "calling_tools"):
                    result = await session.call(reply.calls[0])
                assert tell_results(now, reply, [result])
                await now.reply()
                now = now.branch([{"role": "user", "content": f"So far: {result.text}"}])
        return [each.finish(1.0) for each in pieces]

    scene = Scene()
    episode = scene.episode(call("count", amount=1), "one", call("count", amount=2), "two", "three")
    first, second, last = asyncio.run(run(scene, episode))
    tools = "<|system|>Tools:\ncount(amount)<|end|>"
    assert second.tokens[: second.prompt_length] == encode(f"{tools}<|user|>So far: total 1<|end|><|assistant|>")
    assert second.messages[-2]["content"] == "total 3", "the tool kept its state"
    assert last.tokens == (*encode(f"{tools}<|user|>So far: total 3<|end|><|assistant|>"), *said("three"))
    assert {each.sample for each in (first, second, last)} == {1}
    for piece, texts in ((first, (call("count", amount=1), "one")), (last, ("three",))):
        trained = [token for token, mask in zip(piece.tokens, piece.loss_mask, strict=True) if mask]
        assert trained == [token for text in texts for token in said(text)]
    assert scene.counter.num_released == 1


def test_wrong_settings_are_named():
    bare = WorkflowContext(tiny.tokenizer(), ListedRewards([]), SamplingParams(max_new_tokens=9))
    with pytest.raises(ConfigError, match=r"needs tools; name some in tools\.use"):
        ToolAgentWorkflow(bare)
    context = Scene().context
    with pytest.raises(ConfigError, match=r"max_user_turns = 2: nothing reads this(?s:.*)tool_reward_weight = 0"):
        ToolAgentWorkflow(context, max_user_turns=2, tool_rewards_per_turn=True)
    with pytest.raises(ConfigError, match=r"user = json:decoder: is a module; name a function"):
        ToolAgentWorkflow(context, user="json:decoder")
