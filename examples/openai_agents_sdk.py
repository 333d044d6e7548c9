"""An agent of the OpenAI Agents SDK, trained as it is. The SDK may be installed in a separate environment.

    headwater train examples/openai_agent.yaml rollout.workflow_args.agent=examples/openai_agents_sdk.py:solve \
        rollout.workflow_args.python=.venv-clients/bin/python

docs/endpoint.md explains this file.
"""

from __future__ import annotations

import operator
import re

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool  # type: ignore[untyped-decorator, unused-ignore]
def calculator(expression: str) -> str:
    """Computes one sum, difference or product of whole numbers."""
    if not (found := re.fullmatch(r"(\d{1,9})([-+*])(\d{1,9})", expression)):
        return "error"
    first, sign, second = found.groups()
    return str({"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](int(first), int(second)))


async def solve(base_url: str, api_key: str, prompt: str, ground_truth: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="Solver", model=model, tools=[calculator])
        try:
            result = await Runner.run(agent, prompt, max_turns=3)
        except AgentsException:  # the model called a tool that does not exist, or did not finish
            return 0.0
    return float(str(result.final_output).strip() == ground_truth)
