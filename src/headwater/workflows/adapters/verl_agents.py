"""The agent loops that verl itself has, for classes that derive from them or name them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from headwater.chat.next_turn import next_turn
from headwater.chat.render import MODEL_TURN
from headwater.core.errors import RolloutFailed
from headwater.core.media import MediaContent
from headwater.core.tool_calls import ToolCall
from headwater.tools.base import ToolResponse
from headwater.workflows.adapters.verl import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    FunctionCall,
    ToolParser,
    simple_timer,
)
from headwater.workflows.adapters.verl_tools import SessionTool, initialize_tools_from_config


class SingleTurnAgentLoop(AgentLoopBase):
    """One reply to the prompt."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        timing: dict[str, float] = {}
        messages = list(kwargs["raw_prompt"])
        shown = await self.process_multi_modal_info(messages)
        images, videos = shown.get("images"), shown.get("videos")
        prompt_ids = await self.apply_chat_template(messages, images=images, videos=videos)
        with simple_timer("generate_sequences", timing):
            output = await self.server_manager.generate(
                request_id=uuid.uuid4().hex,
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
                image_data=images,
                video_data=videos,
            )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=timing["generate_sequences"]),
            multi_modal_data=shown,
        )


class AgentState(Enum):
    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"


class AgentData:
    """What a ``ToolAgentLoop`` knows about its episode."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        metrics: dict[str, float],
        request_id: str,
        tools_kwargs: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        **others: Any,
    ) -> None:
        self.messages: list[Mapping[str, Any]] = list(messages)
        self.metrics = metrics
        self.request_id = request_id
        self.tools_kwargs = tools_kwargs
        self.image_data: list[Any] | None = list(image_data) if image_data else None
        self.video_data: list[Any] | None = list(video_data) if video_data else None
        """All images and videos so far: those of the prompt, then those of tools."""
        self.prompt_ids: list[int] = []
        """All tokens so far, the prompt and what follows it."""
        self.response_ids: list[int] = []
        """The last reply."""
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.tool_calls: list[FunctionCall] = []
        self.tool_rewards: list[float] = []
        self.turn_scores: list[float] = []
        self.user_turns = self.assistant_turns = 0
        self.extra_fields: dict[str, Any] = dict(others)


def _content(response: ToolResponse) -> Any:
    """The content of a tool's message: text, or parts that hold images and videos, which come first."""
    images, videos = response.image or (), response.video or ()
    if not images and not videos:
        return response.text or ""
    parts = [
        *({"type": "image", "image": each} for each in images),
        *({"type": "video", "video": each} for each in videos),
    ]
    return [*parts, {"type": "text", "text": response.text}] if response.text else parts


class ToolAgentLoop(AgentLoopBase):
    """Generate, call tools, tell the model the results, and again. Derived classes may override the states' methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        multi_turn = self.rollout_config.multi_turn
        self.max_user_turns = multi_turn.max_user_turns
        self.max_assistant_turns = multi_turn.max_assistant_turns
        self.max_parallel_calls = multi_turn.max_parallel_calls
        self.max_tool_response_length = multi_turn.max_tool_response_length
        self.tool_response_truncate_side = multi_turn.tool_response_truncate_side
        path = multi_turn.tool_config_path
        tools = initialize_tools_from_config(path) if path else []
        self.tools: dict[str, SessionTool] = {tool.name: tool for tool in tools}
        self.tool_schemas = [tool.tool_schema.model_dump() for tool in tools]
        self.tool_parser_name = multi_turn.format
        self.tool_parser = ToolParser.get_tool_parser(self.tool_parser_name, self.tokenizer)
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        shown = await self.process_multi_modal_info(messages)
        data = AgentData(
            messages,
            {},
            uuid.uuid4().hex,
            kwargs.get("tools_kwargs") or {},
            image_data=shown.get("images"),
            video_data=shown.get("videos"),
        )
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            if state is AgentState.PENDING:
                state = await self._handle_pending_state(data, sampling_params)
            elif state is AgentState.GENERATING:
                state = await self._handle_generating_state(data, sampling_params)
            elif state is AgentState.PROCESSING_TOOLS:
                state = await self._handle_processing_tools_state(data)
            elif state is AgentState.INTERACTING:
                state = await self._handle_interacting_state(data)
            else:
                raise RolloutFailed(f"{type(self).__name__}: a method returned {state!r}; return an AgentState")
        start = len(data.prompt_ids) - len(data.response_mask)
        end = start + self.response_length
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:start],
            response_ids=data.prompt_ids[start:end],
            response_mask=data.response_mask[: self.response_length],
            response_logprobs=data.response_logprobs[: self.response_length],
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=data.metrics,
            extra_fields={**data.extra_fields, "turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards},
            multi_modal_data={
                name: value for name, value in (("images", data.image_data), ("videos", data.video_data)) if value
            },
        )

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        agent_data.prompt_ids = await self.apply_chat_template(
            agent_data.messages,
            tools=self.tool_schemas,
            images=agent_data.image_data,
            videos=agent_data.video_data,
        )
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        with simple_timer("generate_sequences", agent_data.metrics):
            output = await self.server_manager.generate(
                request_id=agent_data.request_id,
                prompt_ids=agent_data.prompt_ids,
                sampling_params=sampling_params,
                image_data=agent_data.image_data,
                video_data=agent_data.video_data,
            )
        agent_data.assistant_turns += 1
        agent_data.response_ids = output.token_ids
        self._append(agent_data, output.token_ids, 1, output.log_probs)
        if not ignore_termination and self._is_over(agent_data):
            return AgentState.TERMINATED
        _, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(output.token_ids, self.tool_schemas)
        return AgentState.PROCESSING_TOOLS if agent_data.tool_calls else AgentState.TERMINATED

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        with simple_timer("tool_calls", agent_data.metrics):
            made = await asyncio.gather(*(self._call_tool(call, agent_data.tools_kwargs, agent_data) for call in calls))
        messages = []
        for number, (call, (response, reward, _)) in enumerate(zip(calls, made, strict=True)):
            named = {"name": call.name, "tool_call_id": f"call_{number}"}
            messages.append({"role": "tool", "content": _content(response), **named})
            if reward is not None:
                agent_data.tool_rewards.append(reward)
        told = await self._tokens_of(agent_data, calls, messages)
        if len(agent_data.response_mask) + len(told) >= self.response_length:
            return AgentState.TERMINATED
        self._append(agent_data, told, 0, None)
        for response, _, _ in made:
            agent_data.image_data = [*(agent_data.image_data or ()), *(response.image or ())] or None
            agent_data.video_data = [*(agent_data.video_data or ()), *(response.video or ())] or None
        agent_data.user_turns += 1
        return AgentState.GENERATING

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        raise RolloutFailed(
            f"{type(self).__name__} is in {AgentState.INTERACTING}, and verl's interactions are not available; define "
            "_handle_interacting_state, or use the simulated user of rollout.workflow=tool_agent"
        )

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: Mapping[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """The result of one call. The session of the episode creates and releases the tools."""
        tool = self.tools.get(tool_call.name)
        if tool is None:
            return ToolResponse(f"Error: there is no tool {tool_call.name!r}"), 0.0, {}
        instance_id, _ = await tool.create()
        response, reward, metrics = await tool.execute(instance_id, json.loads(tool_call.arguments))
        await tool.release(instance_id)
        return replace(response, text=self._shortened(response.text)), reward, metrics

    def _shortened(self, text: str) -> str:
        most = self.max_tool_response_length
        if len(text) <= most:
            return text
        if self.tool_response_truncate_side == "left":
            return f"{text[:most]}...(truncated)"
        if self.tool_response_truncate_side == "right":
            return f"(truncated)...{text[-most:]}"
        half = most // 2
        return f"{text[:half]}...(truncated)...{text[-half:]}"

    async def _tokens_of(
        self, agent_data: AgentData, calls: Sequence[FunctionCall], messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """The results as tokens, up to the start of the next reply. They are added to the messages, too."""
        written = [
            ToolCall(f"call_{number}", call.name, json.loads(call.arguments)).as_message()
            for number, call in enumerate(calls)
        ]
        chat = [*agent_data.messages, {**MODEL_TURN, "tool_calls": written}, *messages]
        arguments: dict[str, Any] = dict(self.apply_chat_template_kwargs)
        if self.tool_schemas:
            arguments["tools"] = self.tool_schemas
        contents: Sequence[MediaContent] = ()
        if self.processor is not None:
            # In a thread, because other episodes would wait while pictures are encoded.
            history, _ = await asyncio.to_thread(self.processor.pictures.taken, chat[: -len(messages)])
            told, contents = await asyncio.to_thread(self.processor.pictures.taken, messages)
            chat = [*history, *told]
        turn = next_turn(
            self.tokenizer,
            chat,
            agent_data.response_ids,
            arguments,
            has_ended=True,
            processor=None if self.processor is None else self.processor.pictures.processor,
            contents=contents,
        )
        agent_data.messages = turn.chat
        return list(turn.tokens)

    def _append(
        self, agent_data: AgentData, tokens: Sequence[int], mask: int, logprobs: Sequence[float] | None
    ) -> None:
        agent_data.prompt_ids = [*agent_data.prompt_ids, *tokens]
        agent_data.response_mask += [mask] * len(tokens)
        agent_data.response_logprobs += logprobs if logprobs is not None else [0.0] * len(tokens)

    def _is_over(self, agent_data: AgentData) -> bool:
        return (
            len(agent_data.response_mask) >= self.response_length
            or bool(self.max_assistant_turns and agent_data.assistant_turns >= self.max_assistant_turns)
            or bool(self.max_user_turns and agent_data.user_turns >= self.max_user_turns)
        )
