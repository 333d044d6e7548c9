"""Calls as each format writes them, for tests of parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = tuple[str, Mapping[str, Any]]


def schema(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


SEARCH = schema("search", query={"type": "string"}, count={"type": "integer"})
ADD = schema("add", a={"type": "number"}, b={"type": "number"})
SCHEMAS = [SEARCH, ADD]


def _object(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: dict(call[1])}, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def openai_json(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(map(_object, calls)) + "]"


def llama3_json(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + "; ".join(_object(call, "parameters") for call in calls)


def llama3_pythonic(calls: Sequence[Call]) -> str:
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls)
    return f"[{', '.join(written)}]"


def qwen3_coder(calls: Sequence[Call]) -> str:
    def written(call: Call) -> str:
        name, values = call
        lines = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"

    return "\n".join(map(written, calls))


def glm(calls: Sequence[Call]) -> str:
    def written(call: Call) -> str:
        name, values = call
        lines = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in values.items()
        )
        return f"<tool_call>{name}\n{lines}</tool_call>"

    return "\n".join(map(written, calls))


def deepseek(calls: Sequence[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_text(dict(values))}\n```<｜tool▁call▁end｜>"
        for name, values in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_text(dict(values))}"
        "<|tool_call_end|>"
        for number, (name, values) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def mistral(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS][" + ", ".join(map(_object, calls)) + "]"


WRITERS: Mapping[str, Callable[[Sequence[Call]], str]] = {
    writer.__name__: writer
    for writer in (
        hermes, openai_json, llama3_json, llama3_pythonic, qwen3_coder, glm, deepseek, kimi, mistral,
    )
}  # fmt: skip
