"""An agent written with OpenAI's client, unchanged: the model may call a calculator, and the agent runs it.

    headwater train examples/openai_agent.yaml

docs/endpoint.md explains this file.
"""

from __future__ import annotations

import json
import operator
import re
from typing import Any

from openai import OpenAI

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def calculate(arguments: str) -> str:
    try:
        found = re.fullmatch(r"(\d{1,9})([-+*])(\d{1,9})", json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):  # a model may write anything
        found = None
    if found is None:
        return "error"
    first, sign, second = found.groups()
    return str({"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](int(first), int(second)))


def solve(base_url: str, api_key: str, messages: list[Any], ground_truth: str, max_calls: int = 1) -> float:
    client = OpenAI(base_url=base_url, api_key=api_key)
    for _ in range(max_calls + 1):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        reply: Any = answer.choices[0].message
        if not reply.tool_calls:
            return float(reply.content.strip() == ground_truth)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)}
            for call in reply.tool_calls
        ]
        messages = [*messages, reply, *results]
    return 0.0
