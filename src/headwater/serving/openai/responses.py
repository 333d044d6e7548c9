"""``POST /v1/responses`` in terms of chat completions: text and function tools, complete or as a stream of events.

chat = chat_body(body, history=())               # the same request for /v1/chat/completions
writer = ResponseWriter(body)
writer.whole(reply)                              # from the reply of chat completions
writer.events(chunks)                            # from its chunks
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import write_json

_SAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "parallel_tool_calls", "seed", "stop", "user", "metadata",
    "chat_template_kwargs", "prompt_cache_key", "safety_identifier", "return_token_ids",
)  # fmt: skip
_NO_EFFECT = (
    "truncation", "reasoning", "stream", "prompt_cache_retention", "stream_options", "max_tool_calls", "store",
    "service_tier",
)  # fmt: skip
_READ = (
    "input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "previous_response_id", "background",
    "include",
)  # fmt: skip
_INCLUDED = ("reasoning.encrypted_content",)
"""Parts of reasoning items, which responses do not have."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_STREAM_OPTIONS = {"include_usage": True}

Content = str | list[dict[str, Any]]


def chat_body(body: Mapping[str, Any], history: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A request of ``/v1/responses`` as one of ``/v1/chat/completions``. ``history`` are the messages before it."""
    unknown = [name for name in body if name not in (*_SAME, *_NO_EFFECT, *_READ) and body[name] is not None]
    if unknown:
        raise ApiError(f"{unknown[0]}: is not supported by /v1/responses; remove it", param=unknown[0])
    _refuse_unavailable(body)
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    instructions = body.get("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = [*messages, *history, *input_messages(body.get("input"))]
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if not isinstance(body.get("tools") or [], list):
        raise wrong("tools", body["tools"], "must be a list of tools")
    if body.get("tools"):
        chat["tools"] = [_tool(each, f"tools[{place}]") for place, each in enumerate(body["tools"])]
    choice = body.get("tool_choice")
    if choice is not None and chat.get("tools"):
        is_named = isinstance(choice, Mapping) and "name" in choice
        chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if is_named else choice
    text = body.get("text") or {}
    if not isinstance(text, Mapping):
        raise wrong("text", text, "must be an object with format")
    if text.get("format") is not None:
        chat["response_format"] = _response_format(text["format"])
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": _STREAM_OPTIONS}
    return chat


def _refuse_unavailable(body: Mapping[str, Any]) -> None:
    if body.get("background"):
        raise wrong("background", body["background"], "replies are not stored; remove it and wait for the reply")
    include = body.get("include") or []
    if not isinstance(include, list) or any(each not in _INCLUDED for each in include):
        raise wrong("include", include, "responses have no additional parts; remove it")


def input_messages(given: Any) -> list[dict[str, Any]]:
    """The messages of ``input``: a text, or a list of messages, calls and results of calls."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", given, "must be a text, or a list of at least one item")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        _add(messages, item, f"input[{place}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        message = {"role": item.get("role"), "content": _content(item.get("content"), where)}
        if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            messages[-1]["content"] = _joined(messages[-1]["content"], message["content"])
        else:
            messages.append(message)
    elif kind == "function_call":
        # The text and the calls of one reply are items that follow each other.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else _content(output, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":  # what the model thought is in its tokens already
        raise wrong(f"{where}.type", kind, "must be message, function_call, function_call_output or reasoning")


def _content(content: Any, where: str) -> Content:
    """A text; with images, the parts of a chat message."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(f"{where}.content", content, "must be a text, or a list of parts")
    parts = [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
    return parts if any("image_url" in part for part in parts) else "".join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind != "input_image":
        raise wrong(f"{where}.type", kind, f"only text and images are accepted: {', '.join(_TEXT_PARTS)}, input_image")
    if not isinstance(part.get("image_url"), str):
        raise wrong(f"{where}.image_url", part.get("image_url"), "must be a data URL; files are not stored here")
    return {**part, "type": "image_url"}


def _joined(first: Content | None, second: Content) -> Content:
    if isinstance(first, list) or isinstance(second, list):
        return [*_as_parts(first or ""), *_as_parts(second)]
    return (first or "") + second


def _as_parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise wrong(f"{where}.type", kind, "only function tools are available")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _response_format(form: Any) -> Any:
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


class ResponseWriter:
    """Formats replies as ``/v1/responses`` does. ``body`` is the request, parts of which the reply repeats."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def whole(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """The response, from a complete reply of chat completions."""
        (choice,) = reply["choices"]
        message, name = choice["message"], _id(reply["id"])
        output = []
        if message.get("content"):
            output.append(_message_item(name, message["content"], "completed"))
        output += [_call_item(name, place, call) for place, call in enumerate(message.get("tool_calls") or ())]
        if not output:
            output.append(_message_item(name, "", "completed"))
        return self._response(reply, output, choice["finish_reason"], reply.get("usage"))

    async def events(self, chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream, from the chunks of chat completions."""
        stream = _EventStream(self)
        async with aclosing(chunks):
            async for chunk in chunks:
                for event in stream.take(chunk):
                    yield event
        for event in stream.finish():
            yield event

    def _response(
        self, reply: Mapping[str, Any], output: list[dict[str, Any]], reason: str | None, usage: Any
    ) -> dict[str, Any]:
        body = self._body
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        return {
            "id": _id(reply["id"]),
            "object": "response",
            "created_at": reply["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": reply["model"],
            "output": output,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": body.get("previous_response_id"),
            "temperature": body.get("temperature"),
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "usage": None if usage is None else _usage(usage),
        }


class _EventStream:
    """The state of one stream: the item that is being written, and those before it."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self._head: Mapping[str, Any] = {}
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._reason = "stop"
        self._usage: Any = None

    def take(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if not self._head:
            self._head = chunk
            begun = self._writer._response(chunk, [], None, None)
            events += [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                events += self._text(delta["content"])
            for call in delta.get("tool_calls") or ():
                events += self._call(call)
            self._reason = choice["finish_reason"] or self._reason
        return events

    def finish(self) -> list[dict[str, Any]]:
        events = self._close() if self._output or self._open else [*self._begin_text(), *self._close()]
        made = self._writer._response(self._head, self._output, self._reason, self._usage)
        kind = "incomplete" if made["status"] == "incomplete" else "completed"
        return [*events, self._event(f"response.{kind}", response=made)]

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output)}

    def _text(self, text: str) -> list[dict[str, Any]]:
        events = []
        if self._open is None or self._open["type"] != "message":
            events = [*self._close(), *self._begin_text()]
        assert self._open is not None
        self._open["content"][0]["text"] += text
        place = {**self._place(), "content_index": 0}
        return [*events, self._event("response.output_text.delta", **place, delta=text, logprobs=[])]

    def _begin_text(self) -> list[dict[str, Any]]:
        self._open = _message_item(f"{_id(self._head['id'])}_{len(self._output)}", "", "in_progress")
        item = {**self._open, "content": []}
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        part = dict(self._open["content"][0])
        return [added, self._event("response.content_part.added", **self._place(), content_index=0, part=part)]

    def _call(self, call: Mapping[str, Any]) -> list[dict[str, Any]]:
        events = []
        if call.get("id"):
            events = self._close()
            self._open = _call_item(_id(self._head["id"]), len(self._output), call, "in_progress")
            item = {**self._open, "arguments": ""}
            events.append(self._event("response.output_item.added", output_index=len(self._output), item=item))
        elif self._open is not None:
            self._open["arguments"] += call["function"]["arguments"]
        if text := call["function"].get("arguments"):
            events.append(self._event("response.function_call_arguments.delta", **self._place(), delta=text))
        return events

    def _close(self) -> list[dict[str, Any]]:
        """End the item that is being written."""
        item = self._open
        if item is None:
            return []
        item["status"] = "completed"
        if item["type"] == "message":
            part = dict(item["content"][0])
            place = {**self._place(), "content_index": 0}
            events = [
                self._event("response.output_text.done", **place, text=part["text"], logprobs=[]),
                self._event("response.content_part.done", **place, part=part),
            ]
        else:
            named = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **self._place(), **named)]
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._open = None
        return events


def event_bytes(event: dict[str, Any]) -> bytes:
    """A server-sent event. Those of ``/v1/responses`` have a name."""
    name = f"event: {event['type']}\n".encode() if "sequence_number" in event else b""
    return name + b"data: " + write_json(event) + b"\n\n"


def completion_id(name: str) -> str:
    """The id of the chat completion behind a response."""
    return f"chatcmpl-{name.removeprefix('resp_')}" if name.startswith("resp_") else name


def _id(name: str) -> str:
    return name.replace("chatcmpl-", "resp_")


def _message_item(name: str, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{name}", "status": status, "role": "assistant", "content": [part]}


def _call_item(name: str, place: int, call: Mapping[str, Any], status: str = "completed") -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "function_call",
        "id": f"fc_{name}_{place}",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function.get("arguments") or "",
        "status": status,
    }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
