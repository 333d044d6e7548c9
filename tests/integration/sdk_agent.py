"""An agent of the OpenAI Agents SDK that trains in tests: by chat completions or responses, depending on the row."""

from __future__ import annotations

import zlib

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


async def solve(base_url: str, api_key: str, prompt: str, data: dict) -> dict:
    has_responses = zlib.crc32(data["uid"].encode()) % 2
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        made = OpenAIResponsesModel if has_responses else OpenAIChatCompletionsModel
        agent = Agent(name="Tester", model=made(model="policy", openai_client=client), tools=[double])
        try:
            length = len(str((await Runner.run(agent, prompt, max_turns=2)).final_output))
        except AgentsException:  # an untrained model seldom comes to an end, which the SDK does not accept
            length = 0
    return {"reward": length % 3, "length": length, "api": "responses" if has_responses else "chat_completions"}
