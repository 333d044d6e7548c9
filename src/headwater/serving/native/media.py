"""Images and videos of a request as JSON. The bytes of a content travel once per server; then its digest is enough.

    {"kind": "image", "digest": "9f2c...", "blocks": [[4, 16, [1, 4, 4], 1.0]], "frames": ["iVBORw0KGgo..."]}

A block has the fields of ``MediaBlock``, and a frame is an encoded image as base64. An item without frames refers to a
content that the server has seen. If the server no longer has it, the answer has the code ``unknown_media``, and the
client sends the request again with all frames.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from headwater.core.errors import DataError
from headwater.core.media import Media, MediaBlock, MediaContent, MediaKind, PlacedMedia
from headwater.data.media import MediaCache
from headwater.data.pictures import import_pillow, open_picture
from headwater.data.videos import MAX_FRAMES_PER_S, MIN_FRAMES_PER_S
from headwater.serving.errors import ApiError, unsupported_by_engine, wrong
from headwater.serving.fields import Fields, is_integer
from headwater.serving.media import MAX_REQUEST_PIXELS, MAX_VIDEO_PIXELS, PixelBudget

UNKNOWN_MEDIA = "unknown_media"
"""The code of the answer to a request that refers to a content which the server does not have."""
MAX_ITEMS = 1024
"""Images and videos of one request, and blocks of one of them."""
MAX_FRAMES = 4096
STORE_BYTES = 512 * 2**20
"""How much of the contents that a server has seen it keeps."""

_KINDS: tuple[MediaKind, ...] = ("image", "video")
_MAX_KNOWN = 2**16


def write_media(media: Media, known: set[str] | None = None) -> list[dict[str, Any]]:
    """``known`` are the digests that were sent to this server. New ones are added to it; without it, all are sent."""
    written = []
    if known is not None and len(known) > _MAX_KNOWN:
        known.clear()  # the server has forgotten most of them, too
    for item in media:
        content = item.content
        told: dict[str, Any] = {
            "kind": content.kind,
            "digest": content.digest,
            "blocks": [[each.start, each.length, each.grid, each.time_step] for each in item.blocks],
        }
        if content.frames_per_s:
            told["frames_per_s"] = content.frames_per_s
        if known is None or content.digest not in known:
            told["frames"] = [base64.b64encode(frame).decode("ascii") for frame in content.frames]
            if known is not None:
                known.add(content.digest)
        written.append(told)
    return written


def read_media(values: Any, num_tokens: int, store: MediaCache | None) -> Media:
    """The media of a request with ``num_tokens`` tokens. ``store`` is None if the engine takes only text."""
    if not values and values in (None, []):
        return ()
    if store is None:
        raise unsupported_by_engine(
            "media: this server's engine takes only text; remove the images, or serve a vision model", param="media"
        )
    if not isinstance(values, list) or len(values) > MAX_ITEMS:
        raise wrong("media", values, f"must be a list of at most {MAX_ITEMS} items")
    pixels = PixelBudget(MAX_REQUEST_PIXELS, "a request")
    media = tuple(_read_item(value, f"media[{place}]", store, pixels) for place, value in enumerate(values))
    _check_places(media, num_tokens)
    return media


def _read_item(value: Any, name: str, store: MediaCache, pixels: PixelBudget) -> PlacedMedia:
    if not isinstance(value, dict):
        raise wrong(name, value, "must be an object with kind, digest, blocks and frames")
    fields = Fields(value, name)
    kind, digest = fields.choice("kind", _KINDS), fields.text("digest") or ""
    blocks = _read_blocks(fields.raw("blocks"), f"{name}.blocks")
    frames_per_s = fields.number("frames_per_s", 0.0, minimum=0)
    frames = fields.raw("frames")
    fields.done()
    if kind is None:
        raise ApiError(f"{name}.kind: is missing; give image or video", param=f"{name}.kind")
    if frames is None:
        content = store.get(digest)
        if content is None:
            raise ApiError(
                f"{name}: this server does not have the content {digest[:16]!r}; send the request with frames",
                status=409,
                param=f"{name}.digest",
                code=UNKNOWN_MEDIA,
            )
        if content.kind != kind:
            raise wrong(f"{name}.kind", kind, f"the content with this digest is of kind {content.kind}")
        return PlacedMedia(content, blocks)
    if frames_per_s != 0 and not MIN_FRAMES_PER_S <= frames_per_s <= MAX_FRAMES_PER_S:
        rule = f"must be 0, or in {MIN_FRAMES_PER_S:g} to {MAX_FRAMES_PER_S:g}"
        raise wrong(f"{name}.frames_per_s", frames_per_s, rule)
    content = MediaContent.of(kind, _read_frames(frames, kind, f"{name}.frames", pixels), frames_per_s)
    if content.digest != digest:
        raise wrong(f"{name}.digest", digest, f"the frames have the digest {content.digest}; send them again")
    return PlacedMedia(store.put(digest, content), blocks)


def _read_frames(values: Any, kind: str, name: str, pixels: PixelBudget) -> list[bytes]:
    most = 1 if kind == "image" else MAX_FRAMES
    if not isinstance(values, list) or not 1 <= len(values) <= most:
        raise wrong(name, values, f"must be a list of 1 to {most} encoded images")
    frames = []
    budgets = (pixels, PixelBudget(MAX_VIDEO_PIXELS, "an item"))
    import_pillow(name)
    for place, text in enumerate(values):
        try:
            frame = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise ApiError(f"{name}[{place}]: is not base64 ({error}); encode it again", param=name) from error
        try:
            # Only the header. Whoever decodes the picture knows that it is not too large.
            size = open_picture(frame, f"{name}[{place}]").size
            for budget in budgets:
                budget(size, f"{name}[{place}]")
        except DataError as error:
            raise ApiError(str(error), param=name) from error
        frames.append(frame)
    return frames


def _read_blocks(values: Any, name: str) -> tuple[MediaBlock, ...]:
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_ITEMS:
        raise wrong(name, values, f"must be a list of 1 to {MAX_ITEMS} blocks")
    return tuple(_read_block(value, f"{name}[{place}]") for place, value in enumerate(values))


def _read_block(value: Any, name: str) -> MediaBlock:
    rule = "must be [start, length, [time, height, width], time_step]"
    if not isinstance(value, list) or len(value) != 4:
        raise wrong(name, value, rule)
    start, length, grid, time_step = value
    if not isinstance(grid, list) or len(grid) != 3 or not all(map(_is_count, (start, length, *grid))):
        raise wrong(name, value, f"{rule} of whole numbers >= 0")
    if not isinstance(time_step, int | float) or isinstance(time_step, bool) or not 0 <= time_step <= 2**31:
        raise wrong(name, value, f"{rule}, and time_step must be in 0 to 2**31")
    if not length or (any(grid) and grid[0] * grid[1] * grid[2] != length):
        raise wrong(name, value, "length must be > 0, and the product of the grid unless that is 0, 0, 0")
    return MediaBlock(start, length, (grid[0], grid[1], grid[2]), float(time_step))


def _is_count(value: Any) -> bool:
    return is_integer(value) and 0 <= value < 2**31


def _check_places(media: Media, num_tokens: int) -> None:
    """Blocks stand in the order of the tokens, and none of them overlap."""
    end = 0
    for place, item in enumerate(media):
        for number, block in enumerate(item.blocks):
            name = f"media[{place}].blocks[{number}]"
            if block.start < end:
                raise wrong(name, block.start, f"begins before the end of the block before it, {end}; sort them")
            end = block.start + block.length
            if end > num_tokens:
                raise wrong(name, block.start, f"ends at token {end}, and input_tokens has {num_tokens}")
