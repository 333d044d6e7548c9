"""Images and videos inside chat messages, as OpenAI and Hugging Face write them.

    messages = load_message_media([{"role": "user", "content": [{"type": "image", "image": picture}]}], "the request")
    messages, contents = take_message_media(messages)

``load_message_media`` reads every picture, and the part then holds its ``MediaContent``. ``take_message_media`` leaves
``{"type": "image", "digest": ...}`` in its place, which chat templates, records and JSON can show. A part with the
digest of a known content is a complete part, so messages of a conversation can be used again.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headwater.core.errors import DataError
from headwater.core.media import Media, MediaContent, image_type
from headwater.data.media import MediaSettings, load_image, load_video
from headwater.data.media_parts import KINDS, take_inline_media

Message = Mapping[str, Any]


def has_media(messages: Sequence[Message]) -> bool:
    """Whether a message has a part that is an image or a video."""
    return any(_kind_of(part) is not None for message in messages for part in _parts(message))


def load_message_media(
    messages: Sequence[Message],
    place: str,
    known: Mapping[str, MediaContent] | None = None,
    *,
    settings: MediaSettings | None = None,
    may_read_files: bool = True,
) -> list[Message]:
    """The messages with a ``MediaContent`` in every image or video part.

    ``known`` has contents by their digest, for parts that name one. With ``may_read_files=False`` only data URLs and
    bytes are accepted: a request over the network must not read files of this machine.
    """
    rules = settings or MediaSettings()
    if not may_read_files:
        rules = replace(rules, allow_files=False, allow_remote=False)
    return [
        {
            **message,
            "content": [
                _loaded(part, f"{place}[{at}].content[{number}]", known or {}, rules)
                for number, part in enumerate(_parts(message))
            ],
        }
        if has_media([message])
        else message
        for at, message in enumerate(messages)
    ]


def take_message_media(messages: Sequence[Message]) -> tuple[list[Message], list[MediaContent]]:
    """The messages with digests instead of the contents that ``load_message_media`` put there, and these in order."""
    contents: list[MediaContent] = []

    def taken(part: Any) -> Any:
        content = part.get(kind) if (kind := _kind_of(part)) else None
        if not isinstance(content, MediaContent):
            return part
        contents.append(content)
        return {"type": content.kind, "digest": content.digest}

    made = [
        {**message, "content": [taken(part) for part in parts]} if (parts := _parts(message)) else message
        for message in messages
    ]
    return made, contents


def with_digests(messages: Sequence[Message], media: Media) -> list[Message]:
    """The messages of a prompt, whose parts of images and videos are identified by the digests of ``media``.

    The messages stay as they are if they have another number of such parts.
    """
    waiting = {kind: [item.content for item in media if item.content.kind == kind] for kind in ("image", "video")}
    kinds = [_kind_of(part) for message in messages for part in _parts(message)]
    if not media or any(kinds.count(kind) != len(contents) for kind, contents in waiting.items()):
        return list(messages)

    def named(part: Any) -> Any:
        kind = _kind_of(part)
        return part if kind is None else {"type": kind, "digest": waiting[kind].pop(0).digest}

    return [
        {**message, "content": [named(part) for part in parts]} if (parts := _parts(message)) else message
        for message in messages
    ]


def with_data_urls(messages: Sequence[Message], media: Media) -> list[Message]:
    """The messages of a prompt as OpenAI's clients send them: every image is a data URL, and a video a list of them."""
    contents = {item.content.digest: item.content for item in media}

    def filled(part: Any) -> Any:
        content = contents.get(digest_of(part))
        if content is None:
            return part
        urls = [f"data:image/{_format(each)};base64,{base64.b64encode(each).decode()}" for each in content.frames]
        if content.kind == "image":
            return {"type": "image_url", "image_url": {"url": urls[0]}}
        return {"type": "video", "video": urls, "fps": content.frames_per_s}

    return [
        {**message, "content": [filled(part) for part in parts]} if (parts := _parts(message)) else message
        for message in with_digests(messages, media)
    ]


def digest_of(part: Any) -> str:
    """The digest of the image or video of a part; empty for other parts and for one whose content is not loaded."""
    kind = _kind_of(part)
    if kind is None:
        return ""
    content = part.get(kind)
    return content.digest if isinstance(content, MediaContent) else str(part.get("digest", ""))


def _loaded(part: Any, where: str, known: Mapping[str, MediaContent], settings: MediaSettings) -> Any:
    kind = _kind_of(part)
    if kind is None or isinstance(part.get(kind), MediaContent):
        return part
    digest = part.get("digest")
    if isinstance(digest, str):
        if digest in known:
            return {"type": kind, kind: known[digest]}
    elif digest is not None:
        raise DataError(f"{where}: digest = {digest!r}; must be a string, or be left out")
    _, found = take_inline_media([{"role": "user", "content": [part]}], where)
    ((value, _),) = found[kind]
    if value is None:
        raise DataError(f"{where}: a part of type {kind!r} holds no {kind}; write {{'type': {kind!r}, {kind!r}: ...}}")
    load = load_image if kind == "image" else load_video
    return {"type": kind, kind: load(value, where, None, settings)}


def _format(frame: bytes) -> str:
    return image_type(frame) or "png"


def _kind_of(part: Any) -> str | None:
    return KINDS.get(str(part.get("type"))) if isinstance(part, Mapping) else None


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()
