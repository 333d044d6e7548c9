"""Images for servers of other programs, which take one placeholder per image and expand it themselves."""

from __future__ import annotations

import base64

from headwater.core.errors import RequestError
from headwater.core.records import ModelRequest
from headwater.models.vision.placeholders import collapse
from headwater.models.vision.processor import VisionProcessor

_TYPES = ((b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))


def data_url(image: bytes) -> str:
    """An encoded image as text."""
    kind = next((kind for start, kind in _TYPES if image.startswith(start)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


def data_urls(request: ModelRequest) -> list[str]:
    """The images of a request, in order."""
    return [data_url(item.content.frames[0]) for item in request.media]


def short_prompt(request: ModelRequest, processor: VisionProcessor) -> tuple[int, ...]:
    """The input tokens with one placeholder per image. The first call for an image takes a while."""
    try:
        return tuple(collapse(request.input_tokens, request.media, processor))
    except ValueError as error:
        raise RequestError(f"request {request.request_id}: {error}; use rollout.backend=embedded") from error
