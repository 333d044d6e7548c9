"""Images and frames of videos that rollouts refer to. They lie in ``media/`` of the run, each under its digest."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.core.media import MediaContent, image_type
from headwater.dashboard.errors import bad_request, not_found, unreadable
from headwater.dashboard.parameters import need, whole
from headwater.dashboard.rollout_row import parsed
from headwater.dashboard.runs import Run

TYPES = {"png": "png", "jpg": "jpeg", "webp": "webp", "gif": "gif", "bmp": "bmp"}
"""Endings of files and the types of their images. Nothing else is sent: a browser runs scripts of some formats."""
MOST_BYTES = 64 << 20
_MOST_ITEMS = 1000
_MOST_BLOCKS = 1000
_MOST_FRAMES = 10_000
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Picture:
    content_type: str
    content: bytes

    @property
    def data_url(self) -> str:
        return f"data:{self.content_type};base64,{base64.b64encode(self.content).decode('ascii')}"


def picture(run: Run, given: Mapping[str, str]) -> Picture:
    """The image with a digest, or a frame of a video. The file's name is made here, so only such files can be read."""
    digest, frame = need(given, "digest"), whole(given, "frame", None, low=0, high=_MOST_FRAMES)
    if not _DIGEST.fullmatch(digest):
        raise bad_request(f"digest = {digest[:80]!r}: must be 64 digits and letters from a to f.")
    stem = digest if frame is None else f"{digest}.{frame}"
    for ending, kind in TYPES.items():
        content = _read(run.directory.media / f"{stem}.{ending}")
        if content is None:
            continue
        if image_type(content) != kind:
            raise unreadable(f"{stem}.{ending} of the run is not an image of the type image/{kind}.")
        # The digest of a video is that of all its frames.
        if frame is None and MediaContent.of("image", [content]).digest != digest:
            raise unreadable(f"{stem}.{ending} of the run has changed since it was written.")
        return Picture(f"image/{kind}", content)
    raise not_found(f"The run has no image {stem[:16]}... in its folder media.")


def _read(path: Path) -> bytes | None:
    """The content of a file; None if there is none. Links are not followed, because they may lead elsewhere."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError:
        return None
    if len(content) > MOST_BYTES:
        raise unreadable(f"{path.name[:16]}... has more than {MOST_BYTES >> 20} MiB.")
    return content


def media_of(value: object) -> list[dict[str, Any]]:
    """The column ``media`` of a rollout: each image or video, and the places of the tokens that stand for it."""
    found = parsed(value, [])
    if not isinstance(found, list):
        return []
    items = [_item(each) for each in found[:_MOST_ITEMS] if isinstance(each, Mapping)]
    return [item for item in items if item is not None]


def _item(given: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, digest, files, blocks = (given.get(name) for name in ("kind", "digest", "files", "blocks"))
    if kind not in ("image", "video") or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        return None
    places = [
        [each["start"], each["length"]]
        for each in (blocks if isinstance(blocks, list) else [])[:_MOST_BLOCKS]
        if isinstance(each, Mapping) and _is_count(each.get("start")) and _is_count(each.get("length"))
    ]
    rate = given.get("frames_per_s")
    return {
        "kind": kind,
        "digest": digest,
        "num_frames": min(len(files), _MOST_FRAMES) if isinstance(files, list) else 1,
        "frames_per_s": rate if isinstance(rate, int | float) else None,
        "blocks": places,
    }


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
