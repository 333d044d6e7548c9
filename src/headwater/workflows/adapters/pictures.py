"""Images and videos of foreign classes, which hold them as Pillow images and send them beside tokens.

A class renders a chat with ``processor``, which it is constructed with, and sends the tokens with ``image_data``.
``Pictures`` turns these into ``MediaContent``, and finds the tokens that stand for each.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from headwater.chat.render import encode_rendered, render_chat, without_nones
from headwater.core.errors import DataError, RolloutFailed
from headwater.core.media import Media, MediaContent, MediaProcessor, PlacedMedia
from headwater.data.media import load_image, load_video, media_cache
from headwater.data.message_media import load_message_media, take_message_media, with_digests
from headwater.tools.results import is_picture
from headwater.workflows.episode import WorkflowContext

Message = Mapping[str, Any]
_BASE64 = re.compile(r"[A-Za-z0-9+/]{32,}={0,2}")


class Pictures:
    """Reads and places the images and videos of all episodes of a workflow."""

    def __init__(self, context: WorkflowContext) -> None:
        self._context = context
        self._contents = media_cache()
        """By their pixels: a class that receives a picture of a row sends the same picture back."""

    @property
    def processor(self) -> MediaProcessor:
        if self._context.processor is None:
            raise RolloutFailed("images or videos were given, but the model takes only text; use a vision model")
        return self._context.processor

    async def by_kind(self, contents: Sequence[MediaContent]) -> dict[str, list[Any]]:
        """The contents as ``shown``, under ``image`` and ``video``. A kind without contents is left out."""
        made: dict[str, list[Any]] = {}
        for content in contents:
            # In a thread, because other episodes would wait while pictures are decoded.
            made.setdefault(content.kind, []).append(await asyncio.to_thread(self.shown, content))
        return made

    def shown(self, content: MediaContent) -> Any:
        """A content as classes hold it: a Pillow image, or a list of these."""
        frames = content.images()
        if content.kind == "image":
            self._contents.put(_key(frames[0]), content)
            return frames[0]
        self._contents.put(tuple(map(_key, frames)), content)
        return frames

    def messages(self, messages: Sequence[Message], media: Media) -> list[dict[str, Any]]:
        """The messages of a prompt with the images and videos themselves inside their parts."""
        contents = {item.content.digest: item.content for item in media}

        def filled(part: Any) -> Any:
            content = contents.get(part.get("digest", "")) if isinstance(part, Mapping) else None
            return part if content is None else {"type": content.kind, content.kind: self.shown(content)}

        return [
            {**message, "content": [filled(part) for part in message["content"]]}
            if isinstance(message.get("content"), (list, tuple))
            else dict(message)
            for message in with_digests(messages, media)
        ]

    def read(self, images: Any, videos: Any = None) -> list[MediaContent]:
        """The contents of lists of images and videos, or of a single one."""
        if not _listed(images) and not _listed(videos):
            return []
        settings, _ = self._context.media_settings, self.processor
        try:
            return [
                *(self._image(each, f"image {number}", settings) for number, each in enumerate(_listed(images))),
                *(self._video(each, f"video {number}", settings) for number, each in enumerate(_listed(videos))),
            ]
        except DataError as error:
            raise RolloutFailed(str(error)) from error

    async def read_in_thread(self, images: Any, videos: Any = None) -> list[MediaContent]:
        """``read``, while other episodes continue."""
        if not _listed(images) and not _listed(videos):
            return []
        return await asyncio.to_thread(self.read, images, videos)

    def taken(self, messages: Sequence[Message]) -> tuple[list[Message], list[MediaContent]]:
        """The messages without the images and videos inside their parts, and these. Parts that hold none stay."""
        return take_message_media(self.held(messages))

    def held(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with a ``MediaContent`` in every part that holds an image or a video."""
        return [
            {**message, "content": [self._held(part) for part in message["content"]]}
            if isinstance(message.get("content"), (list, tuple))
            else message
            for message in messages
        ]

    def encode(
        self,
        messages: Sequence[Message],
        contents: Sequence[MediaContent],
        arguments: Mapping[str, Any],
        **options: Any,
    ) -> list[int]:
        """The tokens of a chat with as many parts of images and videos as ``contents``."""
        tokenizer = self._context.tokenizer
        if self._context.processor is None:
            return list(encode_rendered(tokenizer, render_chat(tokenizer, messages, arguments, **options)))
        text = render_chat(self.processor.template, messages, arguments, **options)
        return list(self.expanded(text, contents))

    def expanded(self, text: str, contents: Sequence[MediaContent]) -> tuple[int, ...]:
        if not contents:
            return encode_rendered(self._context.tokenizer, text)
        try:
            return self.processor.encode(text, contents)[0]
        except ValueError as error:
            raise RolloutFailed(f"the chat and its images do not match: {error}") from error

    def place(
        self, tokens: Sequence[int], contents: Sequence[MediaContent], earlier: Sequence[tuple[Sequence[int], Media]]
    ) -> Media:
        """Where ``contents`` are among ``tokens``.

        ``earlier`` are sequences that the model has read and written in this episode. Where one is the beginning of
        ``tokens``, its images are those of that sequence, and only the tokens after it are searched: the model may have
        written tokens that look like an image.
        """
        if not contents:
            return ()
        placed: list[PlacedMedia] = []
        start = 0
        for known, media in sorted(earlier, key=lambda each: len(each[0]), reverse=True):
            digests = [item.content.digest for item in media]
            if digests == [each.digest for each in contents[: len(media)]] and tuple(tokens[: len(known)]) == tuple(
                known
            ):
                placed, start = list(media), len(known)
                break
        for number, content in enumerate(contents[len(placed) :], len(placed)):
            pattern, item = self._pattern(content)
            at = _find(tokens, pattern, start)
            if at is None:
                raise RolloutFailed(
                    f"{content.kind} {number}: the request has no {len(pattern)} tokens in a row that stand for it; "
                    "make the tokens with the processor or the apply_chat_template that the class is given, and send "
                    f"every {content.kind} in the order of the chat"
                )
            placed.append(item.moved(at))
            start = at + len(pattern)
        return tuple(placed)

    def _pattern(self, content: MediaContent) -> tuple[tuple[int, ...], PlacedMedia]:
        """The tokens from the first to the last that stand for a content, and the content among them."""
        message = {"role": "user", "content": [{"type": content.kind}]}
        tokens, (item,) = self.processor.encode(render_chat(self.processor.template, [message]), [content])
        first = min(block.start for block in item.blocks)
        return tokens[first : item.end], item.moved(-first)

    def _held(self, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = part.get(kind) if kind in ("image", "video") else None
        has_settings = isinstance(part, Mapping) and not without_nones(part).keys() <= {"type", kind}
        if value is not None and not has_settings and not isinstance(value, MediaContent):
            (content,) = self.read([value]) if kind == "image" else self.read(None, [value])
            return {"type": kind, kind: content}
        if kind in ("image_url", "video_url") or (value is not None and has_settings):
            (loaded,) = load_message_media(
                [{"role": "user", "content": [part]}], "messages", settings=self._context.media_settings
            )
            return loaded["content"][0]
        return part

    def _image(self, value: Any, where: str, settings: Any) -> MediaContent:
        if isinstance(value, MediaContent):
            return value
        if is_picture(value):
            return self._contents.get_or_load(_key(value), lambda: load_image(value, where, None, settings))
        return load_image(_with_scheme(value), where, None, settings)

    def _video(self, value: Any, where: str, settings: Any) -> MediaContent:
        if isinstance(value, MediaContent):
            return value
        if isinstance(value, (list, tuple)) and value and all(map(is_picture, value)):
            frames = value
            return self._contents.get_or_load(
                tuple(map(_key, frames)), lambda: load_video(frames, where, None, settings)
            )
        return load_video(value, where, None, settings)


class ClassProcessor:
    """``processor`` of foreign classes: called like a processor of transformers, with the run's own tokens."""

    def __init__(self, pictures: Pictures, tokenizer: Any) -> None:
        self.pictures = pictures
        self.tokenizer = tokenizer
        self.chat_template = getattr(tokenizer, "chat_template", None)

    @property
    def image_processor(self) -> Any:
        family = getattr(self.pictures.processor, "family", None)
        return getattr(family, "image_processor", None)

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = False, **arguments: Any) -> Any:
        messages, contents = self.pictures.taken(conversation)
        for name in ("return_dict", "return_tensors", "padding"):
            arguments.pop(name, None)
        add_generation_prompt = bool(arguments.pop("add_generation_prompt", False))
        template = self.pictures.processor.template
        text = render_chat(template, messages, arguments, add_generation_prompt=add_generation_prompt)
        return list(self.pictures.expanded(text, contents)) if tokenize else text

    def __call__(self, text: Any = None, images: Any = None, videos: Any = None, **options: Any) -> Any:
        """``input_ids``, ``attention_mask`` and the tensors of images and videos, for one text."""
        import torch
        from transformers import BatchFeature

        contents = self.pictures.read(images, videos)
        if isinstance(text, (list, tuple)) and text and isinstance(text[0], Mapping):
            text = self.apply_chat_template(text, add_generation_prompt=True)
        if isinstance(text, (list, tuple)):
            if len(text) != 1:
                raise RolloutFailed(f"processor: was given {len(text)} texts; call it once for each text")
            (text,) = text
        tokens = self.pictures.expanded(str(text), contents)
        processor: Any = self.pictures.processor
        # Models differ in how the tensors of several pictures are joined.
        tensors = processor.family.joined([processor.inputs(each) for each in contents])
        made = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones((1, len(tokens)), dtype=torch.long)}
        return BatchFeature({**made, **tensors})


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _with_scheme(value: Any) -> Any:
    """AReaL sends images as base64 text."""
    if isinstance(value, str) and not value.startswith("data:") and _BASE64.fullmatch(value[:256].rstrip("=") or "-"):
        try:
            base64.b64decode(value, validate=True)
        except binascii.Error:
            return value
        return f"data:;base64,{value}"
    return value


def _key(image: Any) -> Hashable:
    rgb = image.convert("RGB")
    return rgb.size, hashlib.sha256(rgb.tobytes()).digest()


def _find(tokens: Sequence[int], pattern: Sequence[int], start: int) -> int | None:
    wanted = tuple(pattern)
    last = len(tokens) - len(wanted)
    return next((at for at in range(start, last + 1) if tuple(tokens[at : at + len(wanted)]) == wanted), None)
