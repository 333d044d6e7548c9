"""verl's tools: those of a run, for agent loops that call them themselves, and the classes that files import."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.core.errors import RolloutFailed
from headwater.core.tool_calls import ToolCall, ToolResult
from headwater.rewards.scorers.gsm8k import gsm8k
from headwater.tools.base import BaseTool, ToolResponse
from headwater.tools.schema import ToolSchema
from headwater.tools.session import ToolSession
from headwater.workflows.adapters.journal import current_journal


@dataclass(frozen=True)
class SessionTool:
    """A tool with the calls of verl's ``BaseTool``. The episode's session runs them, with its limits and counts.

    The tool is created before its first call and released when the episode ends, so it keeps its state between calls.
    """

    tool_schema: ToolSchema
    session: ToolSession = field(repr=False)

    @property
    def name(self) -> str:
        return self.tool_schema.name

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or uuid.uuid4().hex, ToolResponse("")

    async def execute(
        self, instance_id: str, parameters: Mapping[str, Any] | str, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        given = json.loads(parameters) if isinstance(parameters, str) else dict(parameters)
        result = await self.session.call(ToolCall(instance_id, self.name, given))
        return await _response(result), result.reward or 0.0, dict(result.metrics)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return (await self.session.rewards()).get(self.name, 0.0)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Without effect: the episode releases its tools."""


async def _response(result: ToolResult) -> ToolResponse:
    """The result with its images and videos as verl holds them: lists of Pillow images."""
    journal = current_journal()
    if not result.media or journal is None:
        return ToolResponse(result.text)
    shown = await journal.pictures.by_kind(result.media)
    return ToolResponse(result.text, image=shown.get("image"), video=shown.get("video"))


def initialize_tools_from_config(tools_config_file: Any = None) -> list[SessionTool]:
    """The tools of the recipe that the row may use. ``tools.config`` names the file, also one in verl's format."""
    journal = current_journal()
    if journal is None or journal.tools is None:
        raise RolloutFailed(
            "initialize_tools_from_config: the run has no tools; set tools.config to the tool config file, and "
            "call this in the constructor or in run"
        )
    return [SessionTool(ToolSchema.read(schema, "tools"), journal.tools) for schema in journal.tool_schemas]


class _Dumped:
    """A record with the method by which verl's models become dicts."""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {name: _dumped(value) for name, value in vars(self).items() if value is not None}

    @classmethod
    def model_validate(cls, value: Mapping[str, Any]) -> Any:
        return cls(**value)


def _dumped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _dumped(each) for key, each in value.items()}
    return value.model_dump() if isinstance(value, _Dumped) else value


@dataclass
class OpenAIFunctionPropertySchema(_Dumped):
    """One parameter of a function."""

    type: str
    description: str | None = None
    enum: list[str] | None = None


@dataclass
class OpenAIFunctionParametersSchema(_Dumped):
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)


@dataclass
class OpenAIFunctionSchema(_Dumped):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


@dataclass
class OpenAIFunctionParsedSchema(_Dumped):
    """A call as the model wrote it: the arguments are JSON text."""

    name: str
    arguments: str


@dataclass
class OpenAIFunctionCallSchema(_Dumped):
    """A call whose arguments were read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, and whether its arguments could not be read."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return OpenAIFunctionCallSchema(parsed_schema.name, {}), True
        return OpenAIFunctionCallSchema(parsed_schema.name, arguments), False


@dataclass
class OpenAIFunctionToolCall(_Dumped):
    id: str
    function: OpenAIFunctionCallSchema
    type: str = "function"


GSM8K_SCHEMA: Mapping[str, Any] = {
    "name": "calc_gsm8k_reward",
    "description": "Checks the answer to a grade school math problem. 1.0 means right, 0.0 wrong.",
    "parameters": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The model's answer: a number."}},
        "required": ["answer"],
    },
}


class Gsm8kTool(BaseTool):
    """Tells the model whether its answer is right. ``create_kwargs`` of a row give the ``ground_truth``.

    A call that does not improve on the best answer so far costs 0.05.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config, GSM8K_SCHEMA if tool_schema is None else tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(  # verl allows calls without an id
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        made = instance_id or uuid.uuid4().hex
        if ground_truth is None:
            ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        self._instance_dict[made] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return made, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: Mapping[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        answer = str(parameters.get("answer", ""))
        instance = self._instance_dict[instance_id]
        instance["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = float(await self.calc_reward(instance_id) or 0.0)
        change = 0.0 if reward > instance["reward"] else -0.05
        instance["reward"] = reward
        return ToolResponse(f"Current parsed {answer=} {reward=}"), change, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        instance = self._instance_dict[instance_id]
        return gsm8k("gsm8k", instance["response"], instance["ground_truth"], {}, method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)
