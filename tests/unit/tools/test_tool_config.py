"""Which tools a run has: settings, our YAML files, and both of verl's formats."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tools.boxes import ask, call, row, toolbox

from headwater.config.load import load_config
from headwater.config.paths import with_absolute_paths
from headwater.config.rollout_schema import ToolsConfig
from headwater.core.errors import ConfigError, HeadwaterError, UnknownName
from headwater.tools.config import read_entries

CODE = '''
from headwater.tools import BaseTool

class Weather(BaseTool):
    """A tool as in verl: configured with a dict, and told its schema."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        assert self.tool_schema.function.name == self.name

    async def execute(self, instance_id, parameters, **kwargs):
        return f"{self.config['answer']} in {parameters['city']}", 0.5, {}

class Shop:
    """A tool with settings as keyword arguments."""

    tool_schema = {"name": "shop", "description": "A shop.", "parameters": {"properties": {}}}

    def __init__(self, *, price: int = 3):
        self.price = price

    def execute(self, instance_id, parameters):
        return f"{self.price} EUR"

def double(number: int) -> int:
    """Double a number."""
    return 2 * number

class Broken(BaseTool):
    def __init__(self):
        raise OSError("no licence")
'''
SCHEMA = """
    tool_schema:
      type: function
      function:
        name: {name}
        description: The weather in a city.
        parameters:
          type: object
          properties: {{city: {{type: string}}}}
          required: [city]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_weather_tools.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_files_in_our_format_and_in_both_of_verl(folder):
    (folder / "tools.yaml").write_text(
        "tools:\n"
        "  - class_name: my_weather_tools.Weather\n    config: {type: native, answer: Rain}"
        + SCHEMA.format(name="first")
        + "  - tool_implementation: {class_path: my_weather_tools, class_name: Weather, config: {answer: Sun}}"
        + SCHEMA.format(name="second")
        + "  - use: my_weather_tools.py:Shop\n    config: {price: 7}\n    timeout_s: 3\n"
        "  - use: my_weather_tools.py:double\n"
        "  - use: calculator\n    max_result_tokens: 30\n    truncation: right\n"
    )  # fmt: skip
    box = toolbox(config=str(folder / "tools.yaml"))
    assert box.names == ["first", "second", "shop", "double", "calculator"]
    results = ask(
        box,
        call("first", city="Oslo"),
        call("second", city="Rome"),
        call("shop"),
        call("double", number=4),
        call("calculator", expression="10 ** 90"),
    )
    assert [each.text for each in results[:4]] == ["Rain in Oslo", "Sun in Rome", "7 EUR", "8"]
    assert len(results[4].text) < 60
    assert results[0].reward == 0.5


def test_tools_by_path_and_their_settings(folder):
    weather = f"{folder}/my_weather_tools.py:Shop"
    box = toolbox(use=(weather, f"{folder}/my_weather_tools.py:double"), args={weather: {"price": 5}})
    assert [each.text for each in ask(box, call("shop"), call("double", number=2))] == ["5 EUR", "4"]


def test_the_tools_of_verl_become_ours(folder):
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"shop": {"command": "true", "env": {"A": 1}}}}))
    (folder / "verl.yaml").write_text(
        "tools:\n"
        "  - class_name: verl.tools.search_tool.SearchTool\n"
        "    config: {retrieval_service_url: 'http://127.0.0.1:1/retrieve', num_workers: 120,\n"
        "             rate_limit: 120, timeout: 12, type: native}\n"
        "  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool\n"
        "    config: {sandbox_fusion_url: 'http://127.0.0.1:1/run_code', default_timeout: 5, memory_limit_mb: 256,\n"
        "             num_workers: 70,\n"
        "             default_language: python, enable_global_rate_limit: true, type: native}\n"
        "  - class_name: verl.tools.mcp_search_tool.MCPSearchTool\n"
        "    config: {type: mcp, rate_limit: 10, timeout: 45}\n"
        "    mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [add]}\n"
    )
    entries = read_entries(ToolsConfig(config=str(folder / "verl.yaml")))
    assert [each.thing for each in entries] == ["http_search", "sandbox_fusion", "mcp"]
    assert entries[0].settings == {"url": "http://127.0.0.1:1/retrieve", "max_connections": 120}
    assert entries[0].limits == {"timeout_s": 12, "max_concurrent": 120}
    assert entries[1].settings["run_timeout_s"] == 5
    assert entries[1].settings["max_connections"] == entries[1].limits["max_concurrent"] == 70
    assert entries[2].settings == {"servers": {"shop": {"command": "true", "env": {"A": 1}}}, "tools": ["add"]}
    assert entries[2].limits == {"timeout_s": 45}


def test_errors_name_the_file_the_entry_and_the_key(folder):
    path = folder / "tools.yaml"
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"shop": {"command": "true"}}}))
    for text, expected in (
        ("- 1", "must be a mapping"),
        ("tools: {}", r"tools = \{\}: must be a list of tools"),
        ("tools: [1]", r"tools\[0\] = 1: must be a mapping"),
        ("tools: [{use: calculator}]\nmore: 1", "more: no such key"),
        ("tools: [{config: {}}]", r"tools\[0\]: names no tool; give one of use, class_name"),
        ("tools: [{use: calculator, class_name: a.B}]", r"tools\[0\]: has use and class_name"),
        ("tools: [{use: calculator}, {use: 3}]", r"tools\[1\].use = 3: must be text"),
        ("tools: [{use: calculator, cofnig: {}}]", r"tools\[0\].cofnig: no such key; did you mean 'config'"),
        ("tools: [{use: calculator, config: 3}]", r"tools\[0\].config = 3: must be a mapping"),
        ("tools: [{use: calculator, config: {digits: 3}}]", r"tools\[0\].config.digits = 3: no such setting; did you"),
        ("tools: [{use: calculator, config: {max_digits: x}}]", r"tools\[0\].config.max_digits = 'x'"),
        ("tools: [{use: calculator, config: {max_digits: 3}}]", r"max_digits = 3: must be in \[10, 4000\]"),
        ("tools: [{use: calculator, timeout_s: 0}]", r"tools\[0\].timeout_s = 0: must be > 0"),
        ("tools: [{use: calculator, truncation: up}]", r"tools\[0\].truncation = 'up'"),
        ("tools: [{tool_implementation: {class: x}}]", r"tools\[0\].tool_implementation.class: no such key"),
        ("tools: [{tool_implementation: {class_path: x}}]", "tool_implementation.class_name = None: must be text"),
        ("tools: [{use: calculator, tool_schema: {name: a b}}]", r"tools\[0\]: tool_schema.name = 'a b'"),
        (
            "tools: [{use: my_weather_tools.py:double, config: {a: 1}}]",
            r"tools\[0\]: is a function and has no settings",
        ),
        ("tools: [{class_name: my_weather_tools.Weather}]", r"tools\[0\]: .*has no tool_schema"),
        ("tools: [{use: calculator}, {use: calculator}]", r"tools\[1\]: the name 'calculator' is taken by .*\[0\]"),
        ("tools: [{use: mcp, mcp: {path: x}}]", r"tools\[0\].mcp.path: no such key"),
        ("tools: [{use: mcp, mcp: {mcp_servers_config_path: x}}]", r"mcp_servers_config_path = .*x: cannot be read"),
        ("tools: [{use: mcp, config: {}}]", r"tools\[0\]: give either servers, or command or url"),
        ("tools: [{use: mcp, config: {servers: {a: {comand: x}}}}]", r"tools\[0\]: servers.a.comand: no such key"),
        (
            "tools: [{use: mcp, config: {type: mcp, timout: 3}, mcp: {mcp_servers_config_path: servers.json}}]",
            r"tools\[0\].config.timout: no such setting; did you mean 'timeout'",
        ),
        (
            "tools: [{use: mcp, config: {servers: {a: {url: 'http://x', type: sse}}}}]",
            r"servers.a.type = 'sse': not supported; use stdio with a command, or streamable-http",
        ),
        (
            "tools: [{use: mcp, config: {servers: {a: {command: x, transport: streamable-http}}}}]",
            r"servers.a.transport = 'streamable-http': needs url",
        ),
        ("tools: [", "not valid YAML"),
        ("tools: []\ntools: []", "is given twice"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=expected):
            toolbox(config=str(path))
    for text, expected in (
        ("tools: [{use: calculater}]", r"tools\[0\]: unknown tool 'calculater'; did you mean 'calculator'"),
        ("tools: [{use: nothing.py:Thing}]", r"tools\[0\]: .*nothing.py: no such file"),
        ("tools: [{class_name: my_weather_tools.Wether}]", r"tools\[0\]: .*has no 'Wether'; did you mean 'Weather'"),
        ("tools: [{class_name: not_there.Tool}]", r"tools\[0\]: cannot import 'not_there'"),
    ):
        path.write_text(text)
        with pytest.raises(UnknownName, match=expected):
            toolbox(config=str(path))
    path.write_text("tools: [{use: my_weather_tools.py:Broken}]")
    with pytest.raises(HeadwaterError, match=r"tools\[0\]: raised OSError: no licence"):
        toolbox(config=str(path))
    with pytest.raises(ConfigError, match=r"no such file; did you mean .*tools.yaml"):
        toolbox(config=str(folder / "tool.yaml"))


def test_settings_of_a_recipe():
    with pytest.raises(ConfigError, match=r"tools.use = .*calculater.*no such name; did you mean 'calculator'"):
        load_config(["quickstart"], ["tools.use=[calculater]"])
    with pytest.raises(ConfigError, match=r"tools.args.serch: no such tool in tools.use"):
        toolbox(use=("calculator",), args={"serch": {}})
    given = ["rollout.workflow=tool_agent", "tools.use=[search, my.py:Shop]"]
    given += ["tools.args.search.corpus=a/b.jsonl", "tools.config=tools.yaml"]
    tools = with_absolute_paths(load_config(["quickstart"], given).config).tools
    assert tools.use == ("search", f"{Path.cwd()}/my.py:Shop")
    assert tools.args["search"]["corpus"] == f"{Path.cwd()}/a/b.jsonl"
    assert tools.config == f"{Path.cwd()}/tools.yaml"


def test_a_class_for_verl_runs_without_verl(folder):
    (folder / "verl_tool.py").write_text("""
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class AnswerTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._answers = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        instance_id = instance_id or str(uuid4())
        self._answers[instance_id] = {"ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        reward = float(parameters.get("answer") == self._answers[instance_id]["ground_truth"])
        self._answers[instance_id]["reward"] = reward
        return ToolResponse(text=f"{reward=}"), reward, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return self._answers[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._answers[instance_id]
""")
    (folder / "verl.yaml").write_text(
        "tools:\n  - class_name: verl_tool.AnswerTool\n    config: {type: native}\n"
        "    tool_schema: {type: function, function: {name: answer, description: Answer., parameters: {type: object,\n"
        "      properties: {answer: {type: string, description: The answer.}}, required: [answer]}}}\n"
    )
    box = toolbox(config=str(folder / "verl.yaml"))
    prompt = row(tools_kwargs={"answer": {"create_kwargs": {"ground_truth": "46"}}})

    async def run() -> None:
        async with box.open(prompt) as session:
            result = await session.call(call("answer", answer="46"))
            assert (result.text, result.reward, await session.rewards()) == ("reward=1.0", 1.0, {"answer": 1.0})

    asyncio.run(run())
