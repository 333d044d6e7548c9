"""Reads what a tool's ``execute`` returned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from numbers import Real
from typing import Any

from headwater.core.errors import DataError
from headwater.core.media import MediaContent
from headwater.core.records import is_reward
from headwater.core.tool_calls import ToolResult
from headwater.data.media import MediaSettings, load_image, load_video
from headwater.data.message_media import has_media, load_message_media, take_message_media


class BadResult(Exception):
    """A tool returned something that cannot be given to the model. The text says what."""


def read_result(value: Any, settings: MediaSettings | None = None) -> ToolResult:
    """The result of a call from text, a Pillow image, ``(text, reward, metrics)``, or an object with ``text``.

    A list of message parts with images, as in OpenAI's API, is text and images. Numbers, other lists and dicts become
    JSON. ``BadResult`` for anything else. ``settings`` limit the size of images.
    """
    if isinstance(value, ToolResult):  # of a tool in another process
        return value
    if isinstance(value, tuple):
        return _from_tuple(value, settings)
    try:
        if is_picture(value):
            return ToolResult("", media=(load_image(value, "the image", None, settings),))
        if isinstance(value, list) and has_media([{"content": value}]):
            return _from_parts(value, settings)
        media = _attached(value, settings)
    except DataError as error:
        raise BadResult(f"returned media that cannot be read ({error})") from error
    reward, metrics = getattr(value, "reward", None), getattr(value, "metrics", None)
    if not isinstance(value, str) and (media or isinstance(getattr(value, "text", None), str)):
        return ToolResult(_text(value) if value.text else "", _reward(reward), _metrics(metrics), media=media)
    return ToolResult(_text(value))


async def read_result_apart(value: Any, settings: MediaSettings | None = None) -> ToolResult:
    """``read_result``, in a thread if there are pictures: other episodes would wait while they are decoded."""
    if may_hold_media(value):
        return await asyncio.to_thread(read_result, value, settings)
    return read_result(value, settings)


def may_hold_media(value: Any) -> bool:
    """Whether ``read_result`` may have to read images or videos, which takes a while."""
    if isinstance(value, tuple):
        return any(may_hold_media(each) for each in value[:1])
    if isinstance(value, list):
        return has_media([{"content": value}])
    return is_picture(value) or any(getattr(value, name, None) is not None for name in ("image", "video"))


def is_picture(value: Any) -> bool:
    """Whether ``value`` is an image of Pillow, without importing Pillow."""
    return any(each.__module__ == "PIL.Image" and each.__name__ == "Image" for each in type(value).__mro__)


def _from_parts(parts: list[Any], settings: MediaSettings | None) -> ToolResult:
    told = [{"role": "tool", "content": parts}]
    # What a service returned must not name files of this machine.
    messages = load_message_media(told, "the result", settings=settings, may_read_files=False)
    _, contents = take_message_media(messages)
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return ToolResult("\n".join(texts), media=tuple(contents))


def _attached(value: Any, settings: MediaSettings | None) -> tuple[MediaContent, ...]:
    """The images and videos of a response object, such as ``ToolResponse`` or that of verl."""
    if isinstance(value, (str, bool, int, float, list, Mapping)):
        return ()
    images, videos = getattr(value, "image", None), getattr(value, "video", None)
    if images is not None and not isinstance(images, (list, tuple)):
        images = [images]
    if videos and not isinstance(videos[0], (list, tuple)):
        videos = [videos]
    return (
        *(load_image(each, f"image[{number}]", None, settings) for number, each in enumerate(images or ())),
        *(load_video(each, f"video[{number}]", None, settings) for number, each in enumerate(videos or ())),
    )


def _from_tuple(value: tuple[Any, ...], settings: MediaSettings | None) -> ToolResult:
    if not 1 <= len(value) <= 3:
        raise BadResult(f"returned a tuple of {len(value)} values; return (text, reward, metrics)")
    response, reward, metrics = (*value, None, None)[:3]
    if isinstance(response, tuple):
        raise BadResult("returned a tuple inside a tuple; return (text, reward, metrics)")
    inner = read_result(response, settings)
    return ToolResult(
        inner.text,
        inner.reward if reward is None else _reward(reward),
        {**inner.metrics, **_metrics(metrics)},
        media=inner.media,
    )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = getattr(value, "text", None)
    if isinstance(text, str):
        return text
    if isinstance(value, (bool, int, float, list, Mapping)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadResult(f"returned a {type(value).__name__} that is not JSON ({error})") from error
    raise BadResult(f"returned a {type(value).__name__}; return text, (text, reward, metrics) or a ToolResponse")


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) or not is_reward(value):
        raise BadResult(f"returned the reward {value!r}; it must be a finite number")
    return float(value)


def _metrics(value: Any) -> dict[str, float]:
    """The numbers among the metrics. verl's tools also put text into them, which cannot be averaged."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadResult(f"returned the metrics {value!r}; they must be a dict of numbers")
    return {str(name): float(each) for name, each in value.items() if isinstance(each, Real) and is_reward(each)}
