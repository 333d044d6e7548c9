"""Where the images and videos of a row belong in its prompt: parts of the messages, and the columns that they take.

A part holds its image or video as OpenAI and Hugging Face write it, or takes the next one of a column. What such an
object says is read in ``media.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.chat.render import Message
from headwater.core.errors import DataError
from headwater.data.media import SETTING_KEYS, SOURCE_KEYS, check_keys, keys_with_values
from headwater.data.row_store import PlacedRow

KINDS = {"image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video"}
"""Types of message parts, and what each holds."""
_REFUSED = frozenset({"audio", "audio_url", "input_audio", "file", "input_file"})

InlineValue = tuple[Any, str]
"""A value inside a message and its place; the value is None where a column holds it."""


def take_inline_media(messages: Sequence[Message], place: str) -> tuple[list[Message], dict[str, list[InlineValue]]]:
    """Take images and videos out of the messages. Every such part becomes ``{"type": "image"}`` or a video.

    The second result has one entry for each part, in order.
    """
    found: dict[str, list[InlineValue]] = {"image": [], "video": []}
    taken: list[Message] = []
    for number, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, list):
            parts = []
            for position, part in enumerate(content):
                where = f"{place}[{number}].content[{position}]"
                if part["type"] in _REFUSED:
                    raise DataError(
                        f"{where}: a part of type {part['type']!r} is not supported; remove it from the row"
                    )
                kind = KINDS.get(part["type"])
                if kind is not None:
                    num_of_column = sum(value is None for value, _ in found[kind])
                    found[kind].append((_inline_value(part, kind, where, num_of_column), where))
                parts.append(part if kind is None else {"type": kind})
            message = {**message, "content": parts}
        taken.append(message)
    return taken, found


def place_media(
    inline: Sequence[InlineValue], placed: PlacedRow, key: str, kind: str, prompt_key: str
) -> list[InlineValue]:
    """The values of one kind with their places, in the order of the prompt. Parts without a value take the column's."""
    values = _as_list(placed.row.get(key))
    num_parts = sum(value is None for value, _ in inline)
    if num_parts != len(values):
        raise DataError(
            f"{placed.place}: {prompt_key} has {num_parts} <{kind}> and {key} holds {len(values)}; "
            f"write one <{kind}> per {kind}, and name their column in data.{kind}_key"
        )
    column = iter([(value, f"{placed.place}: {key}[{number}]") for number, value in enumerate(values)])
    return [next(column) if value is None else (value, where) for value, where in inline]


def _inline_value(part: Mapping[str, Any], kind: str, where: str, number: int) -> Mapping[str, Any] | None:
    """A part as an object that holds its image or video; None if the part takes item ``number`` of the column."""
    # The digest is that of a content which is already loaded. Without such a content it says nothing.
    item = {key: value for key, value in keys_with_values(part).items() if key != "digest"}
    if any(key in item for key in SOURCE_KEYS[kind]):
        check_keys(item, kind, where)
        return item
    index = item.pop("index", number)
    check_keys(item, kind, where)
    if part["type"] != kind:
        raise DataError(f"{where}: a part of type {part['type']!r} without a URL; write {{'url': ...}} in it")
    setting = next((key for key in SETTING_KEYS[kind] if key in item), None)
    if setting is not None:
        raise DataError(
            f"{where}: {setting} in a part without its {kind}; write it in the column: "
            f"{{{kind!r}: ..., {setting!r}: {item[setting]!r}}}"
        )
    if index != number:
        raise DataError(
            f"{where}: index = {index!r}, but the {kind}s of the column are used in order, and this part takes number "
            f"{number}; change the order of the column, and remove the index"
        )
    return None


def _as_list(value: Any) -> list[Any]:
    """The items of a media column. A column with a single image need not wrap it in a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
