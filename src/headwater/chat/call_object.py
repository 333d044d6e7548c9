"""Reads call objects such as ``{"name": "search", "arguments": {"query": "tides"}}`` while they arrive, with or without
marks around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headwater.chat.call_draft import CallDraft
from headwater.chat.call_json import BadCall, JsonExtent, checked_name, load_json, read_arguments, read_call
from headwater.chat.reader import Reader, Steps

_KEYS = ("arguments", "parameters")
_SEPARATORS = ",;"


def read_call_object(reader: Reader, draft: CallDraft, keys: Sequence[str] = ("arguments",)) -> Steps[None]:
    """Read the call that is all the text up to the fence of ``reader``."""
    start = reader.place
    yield from pass_call(reader, draft, keys)
    yield from reader.until()
    settle(draft, reader.text_from(start), keys)


def read_named_call(reader: Reader, draft: CallDraft, name: str, *, ending: str | None = None) -> Steps[None]:
    """Read the arguments of a call whose name came before. Raises ``BadCall``.

    With ``ending``, only that text may follow them up to the fence of ``reader``.
    """
    checked_name(name)
    yield from reader.skip_spaces()
    if not (yield from reader.has_more()):
        raise BadCall("the call has no arguments; write {} for none", name)
    start, is_object = reader.place, reader.peeked == "{"
    if is_object:
        draft.begin(name)
    yield from pass_json(reader, draft.argument_text if is_object else None)
    try:
        value = load_json(reader.text_from(start), "the text of the arguments")
    except BadCall as error:
        raise BadCall(str(error), name) from None
    if ending is not None:
        rest, _ = yield from reader.until()
        if rest.strip().removeprefix(ending):
            raise BadCall("other text follows the arguments; write only one JSON object", name)
    draft.complete(name, read_arguments(value, name))


def settle(draft: CallDraft, text: str, keys: Sequence[str] = ("arguments",)) -> None:
    """End ``draft`` with the call in ``text``."""
    try:
        draft.complete(*read_call(load_json(text), keys))
    except BadCall as error:
        draft.fail(error)


def pass_call(reader: Reader, draft: CallDraft, keys: Sequence[str] = ("arguments",)) -> Steps[bool]:
    """Read one call object. Return whether its end was found.

    The draft begins when the name is known and the arguments begin, and gets their text as it arrives. It does not
    begin if the arguments come before the name or are not an object.
    """
    if not (yield from reader.accept("{")):
        return False
    name, seen = "", set[str]()
    while True:
        yield from reader.skip_spaces()
        if (yield from reader.accept("}")):
            return True
        key = yield from _read_text(reader)
        yield from reader.skip_spaces()
        if key is None or not (yield from reader.accept(":")):
            return False
        yield from reader.skip_spaces()
        if not (yield from reader.has_more()):
            return False
        is_first = key not in seen
        seen.add(key)
        if key == "name" and is_first and reader.peeked == '"':
            name = (yield from _read_text(reader)) or ""
        elif key in keys and name and not draft.has_begun and reader.peeked == "{":
            draft.begin(name)
            if not (yield from pass_json(reader, draft.argument_text)):
                return False
        elif not (yield from pass_json(reader)):
            return False
        yield from reader.skip_spaces()
        if not (yield from reader.accept(",")) and not ((yield from reader.has_more()) and reader.peeked == "}"):
            return False


def pass_json(reader: Reader, report: Callable[[str], None] | None = None) -> Steps[bool]:
    """Read one JSON value without checking it. Return whether its end was found.

    ``report`` gets the text of the value as it arrives.
    """
    extent = JsonExtent()
    while text := (yield from reader.next_text()):
        num_taken = extent.feed(text)
        reader.go_back(reader.place - len(text) + num_taken)
        if report is not None and num_taken:
            report(text[:num_taken])
        if extent.is_done or extent.is_broken:
            return extent.is_done
    return False


def _read_text(reader: Reader) -> Steps[str | None]:
    """Read a JSON string. None if there is none."""
    start = reader.place
    if not (yield from reader.has_more()) or reader.peeked != '"' or not (yield from pass_json(reader)):
        return None
    try:
        value = load_json(reader.text_from(start))
    except BadCall:
        return None
    return value if isinstance(value, str) else None


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
