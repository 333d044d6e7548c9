"""Files that users have written for verl and AReaL, imported as they are, with neither package installed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny
from rewards.ending import end_verifier
from test_adapters import answer, context_of, episode_of

from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.errors import InvalidTrajectory, RolloutFailed
from headwater.core.registry import load_object
from headwater.core.tool_calls import ToolCall
from headwater.tools.toolbox import Toolbox
from headwater.workflows.adapters.areal_workflow import ArealWorkflow
from headwater.workflows.adapters.verl_loop import VerlWorkflow

REWARD = """
from verl.utils.reward_score import default_compute_score, gsm8k, math_reward
from verl.utils.reward_score.gsm8k import extract_solution
from verl.utils.reward_score.math_dapo import compute_score as dapo_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    from verl.utils.reward_score import math
    assert math.compute_score("\\\\boxed{2}", "2") == 1.0
    assert extract_solution(solution_str) == "1234", extract_solution(solution_str)
    made = gsm8k.compute_score(solution_str, ground_truth, method="strict", score=2.0)
    assert gsm8k.compute_score("#### 5", "6", format_score=0.25) == 0.25
    assert default_compute_score("openai/gsm8k", solution_str, ground_truth) == 1.0
    assert math_reward.compute_score("so \\\\boxed{\\\\frac12}", "0.5") == 1.0
    assert math_reward.is_equiv("x+1", "1+x")
    assert math_reward.remove_boxed(math_reward.last_boxed_only_string("\\\\boxed{7}")) == "7"
    assert dapo_score("Answer: 7", "7") == {"score": 1.0, "acc": True, "pred": "7"}
    return made
"""

TOOL = """
from typing import Any, Optional
from uuid import uuid4
from verl.tools.base_tool import BaseTool
from verl.tools.gsm8k_tool import Gsm8kTool
from verl.tools.schemas import (
    OpenAIFunctionParametersSchema, OpenAIFunctionPropertySchema, OpenAIFunctionSchema, OpenAIFunctionToolSchema,
    OpenAIFunctionParsedSchema, OpenAIFunctionCallSchema, ToolResponse,
)

class Doubler(BaseTool):
    def get_openai_tool_schema(self):
        number = OpenAIFunctionPropertySchema(type="integer", description="A number")
        parameters = OpenAIFunctionParametersSchema(type="object", properties={"x": number}, required=["x"])
        function = OpenAIFunctionSchema(name="double", description="Doubles a number.", parameters=parameters)
        return OpenAIFunctionToolSchema(type="function", function=function)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        return ToolResponse(text=str(2 * parameters["x"])), 0.0, {}

class Strict(Gsm8kTool):
    async def execute(self, instance_id, parameters, **kwargs):
        response, reward, metrics = await super().execute(instance_id, parameters, **kwargs)
        return ToolResponse(text=response.text + "!"), reward, metrics

call, failed = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(
    OpenAIFunctionParsedSchema(name="double", arguments='{"x": 2}')
)
assert (call.arguments, failed) == ({"x": 2}, False)
"""

LOOP = """
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

@register("mine")
class Mine(ToolAgentLoop):
    async def _handle_pending_state(self, agent_data: AgentData, sampling_params):
        agent_data.extra_fields["rows"] = len(DataProto.from_dict({}, non_tensors={"x": [1, 2]}))
        return await super()._handle_pending_state(agent_data, sampling_params)

    async def _handle_processing_tools_state(self, agent_data):
        from verl.utils.reward_score.gsm8k import compute_score  # not imported by any file so far
        await super()._handle_processing_tools_state(agent_data)
        return AgentState.INTERACTING

    async def _handle_interacting_state(self, agent_data):
        agent_data.extra_fields["interacted"] = True
        return AgentState.GENERATING

    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        agent_data.extra_fields["called"] = tool_call.name
        return await super()._call_tool(tool_call, tools_kwargs, agent_data)
"""

AREAL = """
import json
from areal.api.workflow_api import RolloutWorkflow
from areal.experimental.openai import ArealOpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

class Agent(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, style="concat"):
        self.gconfig, self.tokenizer, self.style = gconfig, tokenizer, style

    async def arun_episode(self, engine, data):
        client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer, tool_call_parser="hermes")
        messages = list(data["messages"])
        ask = {"model": "default", "temperature": self.gconfig.temperature, "tools": TOOLS}
        first = await client.chat.completions.create(messages=messages, **ask)
        message = first.choices[0].message
        assert message.tool_calls[0].function.name == "add"
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "46"}]
        texts = []
        async for chunk in await client.chat.completions.create(messages=messages, stream=True, **ask):
            texts += [each.delta.content or "" for each in chunk.choices]
        assert "".join(texts) == "46", texts
        if self.style == "none":
            client.set_reward("unknown", 1.0)
        client.set_last_reward(1.0)
        if self.style == "individual":
            return client.apply_reward_discount(turn_discount=0.5)
        return client.export_interactions(style=self.style)
"""


def written(tmp_path, name: str, text: str) -> str:
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def test_a_reward_function_that_calls_the_scorers_of_verl(tmp_path):
    score = load_object(f"{written(tmp_path, 'reward.py', REWARD)}:compute_score")
    try:
        assert score("mine", "It is #### 1,234", "1234") == 2.0
    finally:
        end_verifier()
    code = """
import sys
from headwater.core.registry import load_object
load_object(sys.argv[1])
print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", code, f"{tmp_path}/reward.py:compute_score"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n", "workers stay light"


def test_a_function_may_import_verl_when_it_is_called(tmp_path):
    text = (
        "def score(text):\n    from verl.utils.reward_score import gsm8k\n    return gsm8k.compute_score(text, '7')\n"
    )
    code = """
import sys
from headwater.core.registry import load_object
score = load_object(sys.argv[1])
assert "verl" not in sys.modules
print(score("#### 7"))
"""
    command = [sys.executable, "-c", code, f"{written(tmp_path, 'late.py', text)}:score"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1.0\n"


def test_tools_that_derive_from_those_of_verl(tmp_path):
    file = written(tmp_path, "tools.py", TOOL)
    config = {
        "tools": [
            {"class_name": f"{file}:Strict", "config": {"type": "native"}},
            {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "tool_schema": {"name": "check", "parameters": {
                "type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}}},
            {"class_name": f"{file}:Doubler"},
        ]
    }  # fmt: skip
    path = written(tmp_path, "tools.yaml", json.dumps(config))

    async def go():
        box = Toolbox(ToolsConfig(config=path), SandboxConfig(), tiny.tokenizer())
        kwargs = {name: {"create_kwargs": {"ground_truth": "42"}} for name in ("calc_gsm8k_reward", "check")}
        async with box.open(tiny.prompt(tools_kwargs=kwargs)) as session:
            calls = [("calc_gsm8k_reward", {"answer": "41"}), ("check", {"answer": "42"}), ("double", {"x": 4})]
            results = [await session.call(ToolCall(name, name, arguments)) for name, arguments in calls]
            rewards = await session.rewards()
        await box.close()
        return results, rewards

    results, rewards = asyncio.run(go())
    assert [each.text for each in results] == [
        "Current parsed answer='41' reward=0.0!", "Current parsed answer='42' reward=1.0", "8",
    ]  # fmt: skip
    assert [each.reward for each in results] == [-0.05, 0.0, 0.0]
    assert rewards == {"calc_gsm8k_reward": 0.0, "check": 1.0}


def test_a_class_that_derives_from_the_tool_agent_loop_of_verl(tmp_path):
    loop = load_object(f"{written(tmp_path, 'loop.py', LOOP)}:Mine")

    async def go():
        toolbox = Toolbox(ToolsConfig(use=("calculator",)), SandboxConfig(), tiny.tokenizer())
        context = replace(context_of((0.5,)), tools=toolbox)
        extra = {"verl_config": {"actor_rollout_ref": {"rollout": {"multi_turn": {"format": "hermes"}}}}}
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
        episode = episode_of(context, answer(call), answer("42"))
        made = await VerlWorkflow(loop, "rollout.workflow = x.py:X", extra, context).run(episode)
        await toolbox.close()
        return made

    (made,) = asyncio.run(go())
    text = tiny.tokenizer().decode(made.response_tokens)
    assert text.index("calculator") < text.index("42") < text.rindex("42")
    assert (made.reward, made.info["called"], made.info["rows"], len(made.turn_ends)) == (0.5, "calculator", 2, 2)
    assert made.info["interacted"] is True
    del loop._handle_interacting_state
    with pytest.raises(RolloutFailed, match=r"Mine is in AgentState\.INTERACTING.*_handle_interacting_state"):
        asyncio.run(go())


def test_a_workflow_for_areal_with_openais_client(tmp_path):
    agent = load_object(f"{written(tmp_path, 'agent.py', AREAL)}:Agent")

    def run(style):
        context = context_of()
        call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
        episode = episode_of(context, answer(call), answer("46"))
        return asyncio.run(ArealWorkflow(agent, "rollout.workflow = x.py:X", {"style": style}, context).run(episode))

    (whole,) = run("concat")
    assert (whole.reward, len(whole.turn_ends)) == (1.0, 2)
    first, second = run("individual")
    assert (first.reward, second.reward) == (0.5, 1.0)
    assert second.tokens == whole.tokens
    assert sum(second.loss_mask) == len(answer("46")), "only the last reply is trained"
    assert sum(first.loss_mask) + sum(second.loss_mask) == sum(whole.loss_mask)
    with pytest.raises(InvalidTrajectory, match="no completion 'unknown'"):
        run("none")
