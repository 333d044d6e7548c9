"""Call objects without marks around them. Whether an object is a call depends on its keys."""

from __future__ import annotations

from typing import Any

from headwater.chat.call_draft import CallDraft
from headwater.chat.call_json import BadCall, load_json, read_call
from headwater.chat.call_object import pass_call
from headwater.chat.reader import Reader, Steps

_KEYS = ("arguments", "parameters")
_SEPARATORS = ",;"


def read_bare_calls(reader: Reader, start: int) -> Steps[bool]:
    """Read call objects in a row, or a list of them. Return False if the text does not begin with a call.

    ``start`` is where the text of the first call begins.
    """
    is_list = bool((yield from reader.accept("[")))
    num_calls, end = 0, reader.place
    while True:
        yield from reader.skip_spaces()
        if not (yield from reader.has_more()) or reader.peeked != "{":
            break
        if not (yield from _read_object(reader, start if num_calls == 0 else reader.place)):
            break
        num_calls, end = num_calls + 1, reader.place
        yield from reader.skip_spaces()
        yield from reader.accept(*_SEPARATORS)
    reader.go_back(end)  # what follows the last call is content
    if is_list and num_calls:
        yield from reader.accept_after_spaces("]")
    return num_calls > 0


def _read_object(reader: Reader, start: int) -> Steps[bool]:
    """Read one JSON object. Return whether it is a call, or contains calls; a call may be malformed."""
    place, draft = reader.place, CallDraft(reader, start)
    if not (yield from pass_call(reader, draft, _KEYS)) and draft.has_begun:
        yield from reader.until()  # nothing shows where a broken call ends
    try:
        calls = [read_call(each, _KEYS) for each in _call_objects(load_json(reader.text_from(place)))]
    except BadCall as error:
        if draft.has_begun:
            draft.fail(error)
        return draft.has_begun
    for call in calls:
        draft.complete(*call)
        draft = CallDraft(reader, start)
    return bool(calls)


def _call_objects(value: Any) -> list[Any]:
    """The objects with ``name`` and ``arguments`` in ``value``."""
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("tool_calls"), list):
        return [each for entry in value["tool_calls"] for each in _call_objects(entry)]
    if isinstance(value.get("function"), dict):
        return [value["function"]]
    return [value] if isinstance(value.get("name"), str) and any(key in value for key in _KEYS) else []
