"""Images for servers of other programs, which take one placeholder per image and expand it themselves."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import NamedTuple

from headwater.core.errors import RequestError
from headwater.core.media import PlacedMedia, image_type
from headwater.core.requests import ModelRequest
from headwater.data.media import media_cache
from headwater.models.vision.placeholders import collapse
from headwater.models.vision.processor import VisionProcessor

_CACHE_BYTES = 256 * 2**20


class MediaPrompt(NamedTuple):
    """What a server is given instead of the input tokens of a request with images."""

    tokens: tuple[int, ...] = ()
    """With one placeholder per image; empty for a request without images."""
    images: tuple[bytes, ...] = ()
    """Encoded images, in order."""


NO_MEDIA = MediaPrompt()


class MediaPrompts:
    """Makes the prompts of requests with images. May be used by several threads.

    Images are sent in the size in which the model reads them, if that is known. These programs scale images with
    torchvision, whose pixels differ a little from those of Pillow, which the learner uses.
    """

    def __init__(self, processor: VisionProcessor) -> None:
        self._processor = processor
        self._scaled = media_cache(_CACHE_BYTES)

    def of(self, request: ModelRequest) -> MediaPrompt:
        """The first call for an image takes a while."""
        try:
            tokens = tuple(collapse(request.input_tokens, request.media, self._processor))
        except ValueError as error:
            raise RequestError(f"request {request.request_id}: {error}; use rollout.backend=embedded") from error
        return MediaPrompt(tokens, tuple(map(self._image, request.media)))

    def _image(self, item: PlacedMedia) -> bytes:
        content = item.content
        size = self._size(item)
        if size is None:
            return content.frames[0]
        known = self._scaled.get(content.digest)
        if known is None:
            (image,) = content.images()
            frames = content.frames
            if image.size != size:
                stream = io.BytesIO()
                image.resize(size, self._processor.family.image_processor.resample).save(
                    stream, "PNG", compress_level=1
                )
                frames = (stream.getvalue(),)
            known = self._scaled.put(content.digest, replace(content, frames=frames))
        return known.frames[0]

    def _size(self, item: PlacedMedia) -> tuple[int, int] | None:
        """Width and height in which a model with grids of tokens reads an image; None for other models."""
        _, height, width = item.blocks[0].grid
        settings = self._processor.family.image_processor
        if not height or not hasattr(settings, "merge_size"):
            return None
        side = int(settings.patch_size) * int(settings.merge_size)
        return width * side, height * side


def data_url(image: bytes) -> str:
    """An encoded image as text."""
    return f"data:image/{image_type(image) or 'png'};base64,{base64.b64encode(image).decode('ascii')}"
