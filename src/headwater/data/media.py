"""Images and videos of a row: in its columns, or inside the messages as OpenAI and Hugging Face write them."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from headwater.chat.messages import Message
from headwater.core.errors import DataError
from headwater.core.media import MediaContent
from headwater.data.row_store import PlacedRow

KINDS = {"image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video"}
"""Types of message parts, and what each holds."""
_REFUSED = frozenset({"audio", "audio_url", "input_audio", "file", "input_file"})
_INLINE_KEYS = ("url", "path", "bytes", "base64")

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
                    found[kind].append((_inline_value(part, kind, where), where))
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


def _inline_value(part: Mapping[str, Any], kind: str, where: str) -> Any:
    """The image or video that a part holds; None if it holds none."""
    value = part.get(part["type"], part.get(kind, part.get(f"{kind}_url")))
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    if value is None:
        value = next((part[name] for name in _INLINE_KEYS if part.get(name) is not None), None)
        if value is not None and value is part.get("base64"):
            value = f"data:;base64,{value}"
    if value is None and part["type"] != kind:
        raise DataError(f"{where}: a part of type {part['type']!r} without a URL; write {{'url': ...}} in it")
    return value


def _as_list(value: Any) -> list[Any]:
    """The items of a media column. A column with a single image need not wrap it in a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def load_image(value: Any, where: str, folder: Path | None) -> MediaContent:
    """An image from a path, a URL, encoded bytes, ``{"bytes": ...}``, ``{"path": ...}`` or a Pillow image."""
    return MediaContent.of("image", [_encoded(value, where, folder)])


def load_video(value: Any, where: str, folder: Path | None) -> MediaContent:
    """A video from a list of frames."""
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{where}: a video must be a list of frames")
    frames = [_encoded(frame, f"{where} frame {number}", folder) for number, frame in enumerate(value)]
    return MediaContent.of("video", frames, 1.0)


def _encoded(value: Any, where: str, folder: Path | None) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{where}: images need Pillow; pip install headwater[vision]") from error
    stream = io.BytesIO()
    try:
        opened = value if isinstance(value, Image.Image) else Image.open(_image_stream(value, where, folder))
        opened.convert("RGB").save(stream, "png")
    except OSError as error:
        raise DataError(f"{where}: not a readable image ({error}); fix or remove it") from error
    return stream.getvalue()


def _image_stream(value: Any, where: str, folder: Path | None) -> io.BytesIO | Path:
    if isinstance(value, Mapping):
        # The layout of datasets.Image: where both are given, the path is only the name of the original file.
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value.startswith("data:"):
        value = _decode_data_url(value, where)
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if isinstance(value, (str, Path)):
        return _existing_file(str(value), where, folder)
    hint = "give a path, a data URL, {'bytes': ...}, {'path': ...} or a Pillow image"
    raise DataError(f"{where}: a {type(value).__name__} is not an image; {hint}")


def _decode_data_url(url: str, where: str) -> bytes:
    header, comma, data = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise DataError(f"{where}: {header[:40]!r} is not a data URL in base64; write 'data:image/png;base64,...'")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: the base64 text of the data URL is damaged ({error}); write it again") from error


def _existing_file(name: str, where: str, folder: Path | None) -> Path:
    if "://" in name:
        url = urlsplit(name)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise DataError(f"{where}: {name!r} is not read over the network; download it and give its path")
        name = unquote(url.path)
    tried: Sequence[Path] = [start / Path(name).expanduser() for start in (folder, Path()) if start is not None]
    for path in tried:
        if path.is_file():
            return path
    looked = " and ".join(str(path) for path in tried)
    raise DataError(f"{where}: no such file: {looked}; relative paths start at the data file's folder")
