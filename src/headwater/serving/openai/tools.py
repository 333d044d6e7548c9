"""The fields of a chat request that concern tools: ``tools``, ``tool_choice``, ``parallel_tool_calls``, and messages.

use = ToolUse.read(fields)
use.schemas                     # what the chat template is given
use.grammar(parser, ...)        # what makes the model call, if a call is required
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from headwater.chat.parsers import CallFormat, CallStream, ToolCallParser
from headwater.chat.reader import ArgumentText, CallBegun, CallEvent, ContentText
from headwater.chat.render import Message
from headwater.core.protocols import Tokenizer
from headwater.core.requests import Grammar
from headwater.core.tool_calls import MalformedCall
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, checked_text

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION_TOOL = 'must be {"type": "function", "function": {"name": ..., "parameters": {...}}}'


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools."""

    schemas: tuple[Mapping[str, Any], ...] = ()
    """The tools that the model is shown: all of the request, or none if ``tool_choice`` is ``none``."""
    choice: Literal["auto", "required"] = "auto"
    name: str = ""
    """The only function that the model may call, if ``tool_choice`` names one."""
    is_parallel: bool = True
    """Whether a message may contain several calls."""

    @classmethod
    def read(cls, fields: Fields) -> ToolUse:
        fields.neutral("functions", [[]], "it is the old name of tools; use tools")
        fields.neutral("function_call", ["none", "auto"], "it is the old name of tool_choice; use tool_choice")
        is_parallel = fields.flag("parallel_tool_calls", True)
        choice = fields.raw("tool_choice")
        schemas = _read_tools(fields.raw("tools"))
        if choice in (None, "auto"):
            return cls(schemas, is_parallel=is_parallel)
        if choice == "none":
            return cls()
        if not schemas:
            raise wrong("tool_choice", choice, "the request has no tools; add them, or remove tool_choice")
        if choice == "required":
            return cls(schemas, "required", is_parallel=is_parallel)
        return cls(schemas, "required", _named(choice, schemas), is_parallel=False)

    def grammar(
        self, parser: ToolCallParser, tokenizer: Tokenizer, answer: Grammar | None, *, in_reasoning: bool
    ) -> Grammar | None:
        """What the reply must match. ``answer`` is the ``response_format`` of the request.

        With both tools and a ``response_format``, the reply is either calls or such a JSON text.
        """
        if self.choice == "auto" and (answer is None or not self.schemas):
            return answer
        schemas = [each for each in self.schemas if self.name in ("", each["function"]["name"])]
        made = None
        if isinstance(parser, CallFormat):
            made = parser.grammar(
                schemas,
                tokenizer,
                is_parallel=self.is_parallel,
                in_reasoning=in_reasoning,
                answer=answer.text if answer is not None and self.choice == "auto" else None,
            )
        if made is None:
            raise ApiError(
                "tool_choice: the parser of tool calls has no grammar, so a call cannot be required; use auto",
                param="tool_choice",
                code="unsupported",
            )
        return made


def _read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong("tools", value, "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise ApiError(f"tools: has {len(value)} tools, and the limit is {MAX_TOOLS}; use fewer", param="tools")
    tools = tuple(_read_tool(each, f"tools[{place}]") for place, each in enumerate(value))
    names = [tool["function"]["name"] for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise wrong(f"tools[{place}].function.name", name, "another tool has this name; use different names")
    return tools


def _read_tool(tool: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise wrong(where, tool, _FUNCTION_TOOL)
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise wrong(f"{where}.function.name", name, "must be 1 to 64 letters, digits, dots, - or _")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_parameters(parameters, f"{where}.function.parameters")
    # Templates print the tool as it is. OpenAI's strict is not part of what a model is shown.
    shown = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return {"type": "function", "function": shown}


def _check_parameters(schema: Any, where: str) -> None:
    if not isinstance(schema, dict):
        raise wrong(where, schema, "must be a JSON schema")
    if schema.get("type", "object") != "object":
        raise wrong(f"{where}.type", schema["type"], "must be object, because arguments have names")
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        raise wrong(f"{where}.properties", properties, "must be an object with a JSON schema for each argument")


def _named(choice: Any, schemas: Sequence[Mapping[str, Any]]) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        remedy = 'must be none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise wrong("tool_choice", choice, remedy)
    known = [each["function"]["name"] for each in schemas]
    if name not in known:
        raise wrong("tool_choice.function.name", name, f"no such tool; the request has {', '.join(known)}")
    return name


def for_template(message: Message, where: str) -> Message:
    """A message of the history as chat templates expect it: arguments are objects, and content is text.

    OpenAI's clients send the arguments of a call as JSON text. A text that is not JSON stays as it is, because a model
    may have written it.
    """
    known = {**message, "role": "system" if message["role"] == "developer" else message["role"]}
    calls = known.get("tool_calls")
    if calls is None or calls == []:
        known.pop("tool_calls", None)
        return known
    if not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", calls, "must be a list of calls")
    known["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    known["content"] = known["content"] or ""
    return known


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, call, 'must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        checked_text(arguments, f"{where}.function.arguments")
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


class ToolMessage:
    """The message of one choice. Streaming it or sending it complete gives the same calls.

    A malformed call whose name is known is sent as a call, with its arguments as the model wrote them; OpenAI's clients
    must expect arguments that are not valid JSON. Without a name, its text is part of the content.
    """

    def __init__(self, stream: CallStream, *, is_parallel: bool = True) -> None:
        self._stream = stream
        self._is_parallel = is_parallel
        self._content = ""
        self._calls: list[dict[str, Any]] = []
        self._is_in_call = False
        self._is_sent = True
        """Whether the call that began last is sent. Without parallel calls, only the first one is."""

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def take(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The deltas that ``text`` adds."""
        events = self._stream.feed(text)
        if is_last:
            events += self._stream.finish()
        return [delta for event in _joined(events) if (delta := self._delta(event)) is not None]

    def whole(self) -> dict[str, Any]:
        """The message, after all text was taken."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message["content"] = self._content or None
            message["tool_calls"] = self._calls
        return message

    def _delta(self, event: CallEvent) -> dict[str, Any] | None:
        if isinstance(event, ContentText):
            return self._text(event.text)
        if isinstance(event, CallBegun):
            return self._begin(event)
        if isinstance(event, ArgumentText):
            return self._argument(event.text) if self._is_sent else None
        has_begun, self._is_in_call = self._is_in_call, False
        return self._text(event.call.text) if isinstance(event.call, MalformedCall) and not has_begun else None

    def _text(self, text: str) -> dict[str, Any]:
        self._content += text
        return {"content": text}

    def _begin(self, event: CallBegun) -> dict[str, Any] | None:
        self._is_in_call, self._is_sent = True, self._is_parallel or not self._calls
        if not self._is_sent:
            return None
        call = {"id": event.call_id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        self._calls.append(call)
        return {"tool_calls": [{"index": len(self._calls) - 1, **copy.deepcopy(call)}]}

    def _argument(self, text: str) -> dict[str, Any]:
        self._calls[-1]["function"]["arguments"] += text
        return {"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": text}}]}


def _joined(events: Sequence[CallEvent]) -> list[CallEvent]:
    """``events`` with neighbouring texts of one kind joined, so that fewer deltas are sent."""
    joined: list[CallEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentText) and isinstance(last, ContentText):
            joined[-1] = ContentText(last.text + event.text)
        elif isinstance(event, ArgumentText) and isinstance(last, ArgumentText):
            joined[-1] = ArgumentText(last.text + event.text)
        else:
            joined.append(event)
    return joined
