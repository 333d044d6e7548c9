"""Comparing conversations: does a request continue what the model has said before?

A client sends the whole conversation with every call, in its own words: it may leave out empty fields, repeat
arguments of tool calls with other spaces, or send text as a list of parts. ``prefix_keys`` has equal keys for
conversations that mean the same.

    keys = prefix_keys([system, user, reply, result], {"tools": [...]})
    keys[2]         # identifies the conversation up to and including the reply
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.data.message_media import digest_of, has_media

Message = Mapping[str, Any]


def prefix_keys(messages: Sequence[Message], template_args: Mapping[str, Any]) -> list[str]:
    """One key per message, for the conversation up to and including that message."""
    key, keys = _digest("", template_args), []
    for message in messages:
        key = next_key(key, message)
        keys.append(key)
    return keys


def next_key(key: str, message: Message) -> str:
    """The key of a conversation that has one more message."""
    return _digest(key, _meaning(message))


def text_of(content: Any) -> str:
    """The text of a message's content, which is a string, a list of text parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def _meaning(message: Message) -> list[Any]:
    role, text = message.get("role"), _shown(message.get("content"))
    if role == "assistant":
        text = text.strip()  # many clients strip replies before they send them back
    # Ids of calls are left out: some clients make up their own.
    return [role, text, [_call(each) for each in message.get("tool_calls") or ()]]


def _shown(content: Any) -> str:
    """The text of a content, with the digests of its images and videos in their places."""
    if isinstance(content, (list, tuple)) and has_media([{"content": content}]):
        return "".join(f"\0{found}\0" if (found := digest_of(part)) else text_of([part]) for part in content)
    return text_of(content)


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = arguments.strip()
    return [function.get("name"), arguments or {}]


def _digest(before: str, value: Any) -> str:
    text = before + json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
