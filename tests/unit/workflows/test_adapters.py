"""What classes for verl and AReaL return is compared with what the engine sampled."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from workflows.episodes import END, ListedRewards, encode
from workflows.scripted_engine import ScriptedEngine

from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.errors import ConfigError, InvalidTrajectory, RewardFailed, RewardTimedOut, RolloutFailed
from headwater.core.protocols import EpisodeInput
from headwater.core.requests import SamplingParams, derive_key
from headwater.core.stand_ins import MODULES, provide
from headwater.tools.toolbox import Toolbox
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.adapters import areal, verl, verl_tools
from headwater.workflows.adapters.areal_workflow import ArealWorkflow, is_areal_workflow
from headwater.workflows.adapters.journal import Claim, Journal
from headwater.workflows.adapters.verl_loop import VerlWorkflow, is_agent_loop

SAMPLING = SamplingParams(max_new_tokens=100, stop_strings=("#",))


def answer(text: str) -> tuple[int, ...]:
    return (*encode(text), END)


def context_of(rewards=(), sampling=SAMPLING) -> WorkflowContext:
    return WorkflowContext(tiny.tokenizer(), ListedRewards(rewards), sampling, max_prompt_tokens=64)


def episode_of(context, *answers, **fields) -> Episode:
    engine = ScriptedEngine(answers, END, version=3)
    return Episode(context, engine, EpisodeInput(tiny.prompt(**fields), sample=1, rng_key=7))


def run(kind, made, *answers, rewards=(), arguments=None, **fields):
    context = context_of(rewards)
    episode = episode_of(context, *answers, **fields)
    return asyncio.run(kind(made, "rollout.workflow = x.py:X", arguments or {}, context).run(episode)), episode


# The names


def test_the_modules_of_verl_and_areal_have_their_names():
    provide()
    for name, (_, offered) in MODULES.items():
        module = importlib.import_module(name)
        assert all(hasattr(module, each.partition("=")[0]) for each in offered)
    with pytest.raises(ModuleNotFoundError, match=r"verl\.utils\.nothing.*not installed"):
        importlib.import_module("verl.utils.nothing")


def test_an_installed_package_is_never_replaced(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "areal"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "areal").mkdir()
    (tmp_path / "areal" / "__init__.py").write_text("mine = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    provide()
    assert importlib.import_module("areal").mine == 1
    assert importlib.import_module("verl.utils.profiler").simple_timer is verl.simple_timer
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'areal\.api'$"):
        importlib.import_module("areal.api")
    sys.modules.pop("areal")


# The journal


@st.composite
def conversations(draw):
    """Turns of given and sampled tokens, and a mask that is 1 only on sampled tokens."""
    small = st.integers(6, 9)  # few different tokens, so that sequences often begin alike
    prompt = draw(st.lists(small, min_size=1, max_size=4))
    turns = draw(
        st.lists(
            st.tuples(st.lists(small, min_size=1, max_size=5), st.lists(small, max_size=3)), min_size=1, max_size=4
        )
    )
    return prompt, turns, draw(st.randoms(use_true_random=False))


@given(conversations())
def test_every_trained_token_has_the_log_prob_and_version_that_the_engine_recorded(conversation):
    prompt, turns, chance = conversation
    journal = Journal(episode_of(context_of(), *[sampled for sampled, _ in turns]))
    tokens, mask, logprobs, versions = list(prompt), [0] * len(prompt), [0.0] * len(prompt), [-1] * len(prompt)

    async def talk() -> None:
        for _, told in turns:
            response = await journal.generate(tokens, SAMPLING)
            tokens.extend((*response.output_tokens, *told))
            mask.extend([*(chance.choice((0, 1, 1)) for _ in response.output_tokens), *[0] * len(told)])
            logprobs.extend((*response.output_logprobs, *[0.0] * len(told)))
            versions.extend((*response.output_versions, *[-1] * len(told)))

    asyncio.run(talk())
    if not any(mask):
        mask[len(prompt)] = 1
    claim = Claim(tuple(tokens), tuple(mask))
    made = journal.trajectory(claim, 0.5)
    assert (made.tokens, made.loss_mask, made.reward) == (tuple(tokens), tuple(mask), 0.5)
    assert made.prompt_length == len(prompt)
    trained = [place for place, is_trained in enumerate(mask) if is_trained]
    assert [made.logprobs[place] for place in trained] == [logprobs[place] for place in trained]
    assert [made.versions[place] for place in trained] == [versions[place] for place in trained]
    assert journal.trajectory(replace(claim, logprobs=tuple(logprobs), versions=tuple(versions)), 0.5) == made

    wrong = chance.choice(trained)
    changed = list(tokens)
    changed[wrong] = 99
    with pytest.raises(InvalidTrajectory, match="did not sample it"):
        journal.trajectory(replace(claim, tokens=tuple(changed)), 0.5)
    before = chance.randrange(wrong)
    changed = list(tokens)
    changed[before] = 99
    with pytest.raises(InvalidTrajectory, match="did not sample it"):
        journal.trajectory(replace(claim, tokens=tuple(changed)), 0.5)
    for column, values in (("logprobs", logprobs), ("versions", versions)):
        values = [value - 1 if place == wrong else value for place, value in enumerate(values)]
        with pytest.raises(InvalidTrajectory, match=f"token {wrong} has"):
            journal.trajectory(replace(claim, **{column: tuple(values)}), 0.5)


def test_tokens_of_another_distribution_are_not_trained():
    journal = Journal(episode_of(context_of(), answer("45"), answer("46")))
    warm = asyncio.run(journal.generate((5, 6), replace(SAMPLING, temperature=0.5)))
    claim = Claim((5, 6, *warm.output_tokens), (0, 0, *[1] * warm.output_len))
    with pytest.raises(InvalidTrajectory, match=r"temperature = 0\.5, and the recipe has 1\.0"):
        journal.trajectory(claim, 0.0)
    plain = asyncio.run(journal.generate(claim.tokens, SAMPLING))
    tokens = (*claim.tokens, *plain.output_tokens)
    made = journal.trajectory(Claim(tokens, (0,) * len(claim.tokens) + (1,) * plain.output_len), 0.0)
    assert made.versions[2:] == (3, 3, 3, 4, 4, 4), "tokens outside the loss keep their versions"
    with pytest.raises(InvalidTrajectory, match="nothing to train"):
        journal.trajectory(Claim(tokens, (0,) * len(tokens)), 0.0)
    with pytest.raises(InvalidTrajectory, match="entries of the mask"):
        journal.trajectory(Claim(tokens, (0,)), 0.0)
    with pytest.raises(RolloutFailed, match="leaves no room"):
        journal.room(164)
    assert (journal.room(163), journal.room(64), journal.room(1)) == (1, 100, 100)


# verl


class TwoTurns(verl.AgentLoopBase):
    def __init__(self, *args, told: str = "Again.", **kwargs):
        super().__init__(*args, **kwargs)
        self.told = told

    async def run(self, sampling_params, **kwargs):
        assert kwargs["extra_info"] == {"index": 4}
        assert kwargs["reward_model"] == {"ground_truth": "46"}
        assert kwargs["difficulty"] == 2
        assert sampling_params["top_k"] == -1
        assert sampling_params["stop"] == ["#"]
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        start, mask = len(ids), []
        for turn in range(2):
            output = await self.server_manager.generate(request_id="r", prompt_ids=ids, sampling_params=sampling_params)
            ids = ids + output.token_ids
            mask += [1] * len(output.token_ids)
            if turn == 0:
                message = {"role": "user", "content": self.told}
                told = await self.apply_chat_template([message], remove_system_prompt=True)
                ids, mask = ids + told, mask + [0] * len(told)
        fields = {"prompt_ids": ids[:start], "response_ids": ids[start:], "response_mask": mask}
        return verl.AgentLoopOutput(**fields, num_turns=3, extra_fields={"note": 1})


def test_an_agent_loop_is_a_workflow():
    assert is_agent_loop(TwoTurns)
    fields = {"extra_info": {"index": 4}, "columns": {"difficulty": 2}}
    (made,), episode = run(VerlWorkflow, TwoTurns, answer("45"), answer("46"), rewards=[0.25], **fields)
    between = encode("<|user|>Again.<|end|><|assistant|>")
    assert made.response_tokens == answer("45") + between + answer("46")
    assert made.loss_mask[made.prompt_length :] == (1,) * 3 + (0,) * len(between) + (1,) * 3
    assert made.versions[made.prompt_length :] == (3,) * 3 + (-1,) * len(between) + (4,) * 3
    assert (made.reward, made.stop_reason, made.info["num_turns"], made.info["note"]) == (0.25, "stop", 3, 1)
    assert made.info["scored"] == 1
    assert episode.context.reward.texts == ["45Again.46"], "as verl: everything after the prompt"
    first, second = episode.engine.requests
    assert (first.rng_key, second.rng_key) == (7, derive_key(7, "turn", 1)), "as the replies of an episode"
    assert second.sampling.max_new_tokens == min(100, 164 - len(second.input_tokens))


class FirstVersions(verl.AgentLoopBase):
    """verl 0.4 passed messages, and returned lists."""

    async def run(self, messages, sampling_params):
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        start = len(ids)
        response_ids = await self.server_manager.generate(
            request_id="r", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 2, "stop": "!"}
        )
        ids += response_ids
        mask = [1] * len(response_ids)
        return verl.AgentLoopOutput(
            prompt_ids=ids[:start], response_ids=response_ids[:8], response_mask=mask, reward_score=1.5
        )


def test_the_interface_of_the_first_versions_works_too():
    (made,), episode = run(VerlWorkflow, FirstVersions, answer("45"))
    assert (made.response_tokens, made.reward, made.stop_reason) == (encode("45"), 1.5, "length")
    assert episode.engine.requests[0].sampling == replace(SAMPLING, max_new_tokens=2, stop_strings=("!",))


def test_what_an_agent_loop_does_wrong_is_a_named_failure():
    class Sloppy(verl.AgentLoopBase):
        params: ClassVar[dict] = {}
        returned: object = None

        async def run(self, sampling_params, **kwargs):
            await self.server_manager.generate("r", prompt_ids=[5], sampling_params={**sampling_params, **self.params})
            return self.returned

    output = verl.AgentLoopOutput(prompt_ids=[5], response_ids=[6, 7], response_mask=[1, 1], reward_score=0.0)
    cases = (
        ({"temprature": 1}, None, RolloutFailed, "'temprature' is not supported; did you mean 'temperature'"),
        ({"n": 2}, None, RolloutFailed, "n = 2"),
        ({"top_p": 3}, None, RolloutFailed, "top_p = 3"),
        ({}, output, InvalidTrajectory, "did not sample it"),
        ({}, {"prompt_ids": []}, InvalidTrajectory, "return an AgentLoopOutput"),
    )
    for params, returned, error, message in cases:
        Sloppy.params, Sloppy.returned = params, returned
        with pytest.raises(error, match=message):
            run(VerlWorkflow, Sloppy, answer("45"))
    Sloppy.params, Sloppy.returned = {}, None
    assert run(VerlWorkflow, Sloppy, answer("45"))[0] is None, "rejected"
    Sloppy.params = {"temperature": 0.0}
    with pytest.raises(AttributeError, match=r"workflow_args\.verl_config"):
        run(VerlWorkflow, _ReadsConfig, answer("45"))
    settings = {"verl_config": {"actor_rollout_ref": {"rollout": {"multi_turn": {"my_chunks": 3}}}}}
    assert run(VerlWorkflow, _ReadsConfig, answer("45"), arguments=settings)[0] is None


class _ReadsConfig(verl.AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        assert self.rollout_config.response_length == 100
        assert self.config.data.max_prompt_length == 64
        assert self.rollout_config.multi_turn.my_chunks == 3
        assert self.rollout_config.get("nothing", 1) == 1


def test_a_tool_parser_of_headwater_reads_calls():
    async def parse():
        parser = verl.ToolParser.get_tool_parser("hermes", tiny.tokenizer())
        text = 'Hm.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        return await parser.extract_tool_calls(encode(text))

    content, calls = asyncio.run(parse())
    assert (content.strip(), calls) == ("Hm.", [verl.FunctionCall("add", '{"a": 1}')])


class CallsTools(verl.AgentLoopBase):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        path = self.rollout_config.multi_turn.tool_config_path
        tools = verl_tools.initialize_tools_from_config(path) if path else []
        self.tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]
        self.parser = verl.ToolParser.get_tool_parser("hermes", self.tokenizer)

    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        start, mask = len(ids), []
        while True:
            output = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
            ids, mask = ids + output.token_ids, mask + [1] * len(output.token_ids)
            _, calls = await self.parser.extract_tool_calls(output.token_ids, self.schemas)
            if not calls:
                break
            for call in calls:
                instance, _ = await self.tools[call.name].create()
                response, _, _ = await self.tools[call.name].execute(instance, json.loads(call.arguments))
                await self.tools[call.name].release(instance)
                told = list(encode(response.text))
                ids, mask = ids + told, mask + [0] * len(told)
        output = {"prompt_ids": ids[:start], "response_ids": ids[start:], "response_mask": mask}
        return verl.AgentLoopOutput(**output, reward_score=1.0)


def test_an_agent_loop_calls_the_tools_of_the_run():
    async def go():
        toolbox = Toolbox(ToolsConfig(use=("calculator",)), SandboxConfig(), tiny.tokenizer())
        context = replace(context_of(), tools=toolbox)
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
        episode = episode_of(context, answer(call), answer("42"))
        made = await VerlWorkflow(CallsTools, "rollout.workflow = x.py:X", {}, context).run(episode)
        counts = dict(toolbox.counts)
        await toolbox.close()
        return made, counts

    (made,), counts = asyncio.run(go())
    assert tiny.tokenizer().decode(made.response_tokens, skip_special_tokens=True).endswith("4242")
    assert counts == {"calls": 1}
    with pytest.raises(RolloutFailed, match=r"set tools\.config"):
        verl_tools.initialize_tools_from_config("tools.yaml")


# AReaL


class Answering(areal.RolloutWorkflow):
    def __init__(self, reward_fn, gconfig, tokenizer, num_rows=1, shape="tensors", limit_s=60.0):
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.reward = areal.AsyncRewardWrapper(reward_fn, timeout_seconds=limit_s, max_retries=1)
        self.tokenizer, self.num_rows, self.shape = tokenizer, num_rows, shape

    async def arun_episode(self, engine, data):
        ids = areal.apply_chat_template(self.tokenizer, data["messages"], add_generation_prompt=True)
        rows = []
        for _ in range(self.num_rows):
            response = await engine.agenerate(areal.ModelRequest(input_ids=ids, gconfig=self.gconfig))
            reward = await self.reward("", "", response.input_tokens, response.output_tokens, **data)
            areal.stats_tracker.get(areal.workflow_context.stat_scope()).scalar(mine=len(rows))
            rows.append(_tensors(response, reward))
        if self.shape == "interactions":
            return {str(number): _Interaction(row) for number, row in enumerate(rows)}
        return None if self.shape == "none" else areal.concat_padded_tensors(rows)


@dataclass
class _Interaction:
    row: dict

    def to_tensor_dict(self):
        return self.row


def _tensors(response, reward):
    columns = {
        "input_ids": response.input_tokens + response.output_tokens,
        "loss_mask": [0] * response.input_len + [1] * response.output_len,
        "logprobs": [0.0] * response.input_len + response.output_logprobs,
        "versions": [-1] * response.input_len + response.output_versions,
        "attention_mask": [True] * (response.input_len + response.output_len),
    }
    made = {name: torch.tensor([values]) for name, values in columns.items()}
    return {**made, "rewards": torch.tensor([float(reward)])}


def test_a_workflow_for_areal_may_return_several_sequences():
    assert is_areal_workflow(Answering)
    for shape in ("tensors", "interactions"):
        arguments = {"num_rows": 2, "shape": shape, "gconfig": {"max_new_tokens": 50}}
        answers = (answer("45"), answer("4"))
        made, episode = run(ArealWorkflow, Answering, *answers, rewards=[0.5, 1.0], arguments=arguments)
        assert [each.response_tokens for each in made] == [answer("45"), answer("4")], "without padding"
        assert [each.reward for each in made] == [0.5, 1.0]
        assert [each.versions[-1] for each in made] == [3, 4]
        assert made[0].info["scored"] == 2, "notes belong to the episode"
        assert made[0].reward_info["scored"] == 2, "it becomes a column of the rollout files"
        assert made[0].info["mine"] == 1
        assert episode.context.reward.texts == ["45", "4"]
        sampling = episode.engine.requests[0].sampling
        assert (sampling.max_new_tokens, sampling.stop_strings, sampling.top_k) == (50, ("#",), 0)
        assert END in sampling.stop_token_ids
    assert run(ArealWorkflow, Answering, answer("4"), rewards=[1.0], arguments={"shape": "none"})[0] is None


def test_a_failed_reward_is_never_a_reward_of_zero():
    calls = []

    def raises(*args, **data):
        calls.append(data["answer"])
        raise ValueError("no number")

    async def hangs(*args, **data):
        await asyncio.sleep(600)

    async def late(*args, **data):
        calls.append("late")
        if calls.count("late") == 1:
            raise ValueError("the first time")
        return 0.75

    with pytest.raises(RewardFailed, match="raises raised ValueError: no number"):
        run(ArealWorkflow, Answering, answer("4"), arguments={"reward_fn": raises})
    assert calls == ["46", "46"], "retried once"
    with pytest.raises(RewardTimedOut, match=r"no result within 0\.2 s"):
        run(ArealWorkflow, Answering, answer("4"), arguments={"reward_fn": hangs, "limit_s": 0.2})
    assert run(ArealWorkflow, Answering, answer("4"), arguments={"reward_fn": late})[0][0].reward == 0.75


def test_what_a_workflow_for_areal_does_wrong_is_a_named_failure():
    class Wrong(areal.RolloutWorkflow):
        def __init__(self, tokenizer, returned):
            self.returned = returned

        async def arun_episode(self, engine, data):
            response = await engine.agenerate(areal.ModelRequest(input_ids=[5, 6]))
            row = _tensors(response, 1.0)
            return self.returned(row) if callable(self.returned) else self.returned

    cases = {
        "returned a list": [],
        "has no tensor 'rewards'": lambda row: {name: row[name] for name in ("input_ids", "loss_mask")},
        "has policy version 9": lambda row: {**row, "versions": torch.full_like(row["versions"], 9)},
        "has log-prob": lambda row: {**row, "logprobs": row["logprobs"] - 1},
        "1 dimensions": lambda row: {**row, "input_ids": row["input_ids"][0]},
    }
    for message, returned in cases.items():
        with pytest.raises(InvalidTrajectory, match=message):
            run(ArealWorkflow, Wrong, answer("45"), arguments={"returned": returned})
    with pytest.raises(ConfigError, match=r"workflow_args\.returned: .* requires it"):
        run(ArealWorkflow, Wrong, answer("45"))
    with pytest.raises(ConfigError, match=r"no such argument.*did you mean 'returned'"):
        run(ArealWorkflow, Wrong, answer("45"), arguments={"returnd": 1})
