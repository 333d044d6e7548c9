"""Images and videos in the messages of a chat request, and how many pixels a client may have decoded."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from headwater.chat.render import Message
from headwater.core.errors import DataError
from headwater.core.media import Media, MediaContent
from headwater.data.media import PROCESSOR_ERRORS, MediaSettings, load_image, load_video, unwrapped
from headwater.data.media_parts import KINDS, take_inline_media
from headwater.data.message_media import has_media, load_message_media, take_message_media
from headwater.data.pictures import check_size
from headwater.serving.errors import ApiError
from headwater.serving.prompt import ModelLimits
from headwater.serving.reading import check_client, continue_as_long_work

MAX_REQUEST_PIXELS = 1 << 30
"""1024 pictures of the default of ``data.max_image_pixels``."""
MAX_VIDEO_PIXELS = 1 << 28
"""256 frames of the same size. All frames of a video are in memory at once."""
MAX_ITEMS = 256
"""Images and videos of one request."""
_DOWNLOAD_LIMIT_S = 10.0
_MAX_DOWNLOAD_BYTES = 32 * 2**20
_PART_BYTES = 2**16


class PixelBudget:
    """Is called with the size of every picture before it is decoded, and refuses the one that is too much.

    A small file can announce a large picture, and a request can hold many.
    """

    def __init__(self, max_pixels: int, owner: str) -> None:
        """``owner`` is what the pictures belong to, for messages."""
        self._max_pixels = max_pixels
        self._owner = owner
        self._num_left = max_pixels

    def __call__(self, size: tuple[int, int], where: str) -> None:
        check_client()
        check_size(size, where)
        self._num_left -= size[0] * size[1]
        if self._num_left < 0:
            raise DataError(
                f"{where}: the pictures of {self._owner} have more than {self._max_pixels} pixels in total; send fewer "
                "or smaller ones"
            )


def pixels_of_request() -> PixelBudget:
    return PixelBudget(MAX_REQUEST_PIXELS, "a request")


def take_media(
    messages: Sequence[Message], limits: ModelLimits, name: str, pixels: PixelBudget | None = None
) -> tuple[list[Message], list[MediaContent]]:
    """The messages with ``{"type": "image", "digest": ...}`` where images are, and these in order.

    Without a processor nothing is taken: the caller refuses parts that are not text. ``pixels`` is shared by all calls
    for one request.
    """
    if limits.processor is None or not has_media(messages):
        return list(messages), []
    count = sum(is_media(part) for message in messages for part in _parts(message))
    if count > MAX_ITEMS:
        raise ApiError(f"{name}: {count} images and videos, and the limit is {MAX_ITEMS}; send fewer", param=name)
    continue_as_long_work()
    check_client()
    settings = MediaSettings(check=pixels or pixels_of_request())
    try:
        messages = [
            _with_downloads(message, f"{name}[{place}]", settings, may_download=limits.fetches_media)
            for place, message in enumerate(messages)
        ]
        loaded = load_message_media(messages, name, settings=settings, may_read_files=False)
    except DataError as error:
        raise ApiError(str(error), param=name, code="bad_media") from error
    taken, contents = take_message_media(loaded)
    return [dict(message) for message in taken], contents


def encode_media(
    text: str, contents: Sequence[MediaContent], limits: ModelLimits, name: str
) -> tuple[tuple[int, ...], Media]:
    """The tokens of a rendered chat, or of a text with placeholders."""
    assert limits.processor is not None, "contents are only taken with a processor"
    try:
        return limits.processor.encode(text, contents)
    except PROCESSOR_ERRORS as error:
        raise ApiError(
            f"{name}: the model's processor refuses the images: {error}; send one part per image, and no placeholder "
            "tokens in texts",
            param=name,
            code="bad_media",
        ) from error


def expand_media(
    tokens: tuple[int, ...], contents: Sequence[MediaContent], limits: ModelLimits, name: str
) -> tuple[tuple[int, ...], Media]:
    """Tokens with one placeholder per image, as those that the model reads."""
    from headwater.models.vision.placeholders import expand
    from headwater.models.vision.processor import VisionProcessor

    if not isinstance(limits.processor, VisionProcessor):
        raise ApiError(f"{name}: images need text, because this processor finds no placeholders in tokens", param=name)
    try:
        return expand(tokens, contents, limits.processor)
    except PROCESSOR_ERRORS as error:
        raise ApiError(f"{name}: {error}; send one placeholder per image", param=name, code="bad_media") from error


def _with_downloads(message: Message, name: str, settings: MediaSettings, *, may_download: bool) -> Message:
    if not isinstance(message.get("content"), list):
        return message
    parts = [
        _downloaded(part, f"{name}.content[{place}]", settings, may_download)
        for place, part in enumerate(message["content"])
    ]
    return {**message, "content": parts}


def _downloaded(part: Any, where: str, settings: MediaSettings, may_download: bool) -> Any:
    """A part whose image is at an address on the network, with that image.

    Not ``data.remote``: it keeps every file, and opens addresses of object stores with this machine's credentials.
    """
    if not is_media(part):
        return part
    kind = KINDS[part["type"]]
    ((item, _),) = take_inline_media([{"role": "user", "content": [part]}], where)[1][kind]
    value, settings = unwrapped(item, kind, where, settings)
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        return part
    if not may_download:
        raise DataError(
            f"{where}: {value[:100]} is not downloaded; send the image as a data URL, or start the server with "
            "--allow-remote-images"
        )
    check_client()
    load = load_image if kind == "image" else load_video
    return {"type": kind, kind: load(_download(value, where), where, None, settings)}


def _download(url: str, where: str) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "headwater"})
    try:
        # The default opener also opens files and FTP.
        opener = urllib.request.OpenerDirector()
        for handler in _HANDLERS:
            opener.add_handler(handler())
        end = time.monotonic() + _DOWNLOAD_LIMIT_S
        content = bytearray()
        with opener.open(request, timeout=_DOWNLOAD_LIMIT_S) as reply:
            # A server that sends a byte now and then never exceeds the limit of one read.
            while len(content) <= _MAX_DOWNLOAD_BYTES and (part := reply.read1(_PART_BYTES)):
                content += part
                if time.monotonic() > end:
                    raise TimeoutError(f"more than {_DOWNLOAD_LIMIT_S:g} s")
    except (OSError, ValueError, HTTPException) as error:
        raise DataError(f"{where}: {url[:200]} cannot be downloaded ({error}); send the image as a data URL") from error
    if len(content) > _MAX_DOWNLOAD_BYTES:
        raise DataError(f"{where}: {url[:200]} has more than {_MAX_DOWNLOAD_BYTES} bytes; send a smaller image")
    return bytes(content)


_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPRedirectHandler,
)


def is_media(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()
