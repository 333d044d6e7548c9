"""A folder of images and videos: every content once, under its digest.

    store = MediaStore(run.path / "media")
    record = store.add(content)             # {"kind": "image", "digest": "3f..", "files": ["3f...png"], ...}
    store.read(record)                      # the same content

An image is a file as it was read, such as ``<digest>.png``. A video has a file for each frame: ``<digest>.0.png``.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.core.disk import disk_full
from headwater.core.errors import RunError
from headwater.core.media import Media, MediaBlock, MediaContent, PlacedMedia, image_type

_ENDINGS = {"jpeg": "jpg", "tiff": "tif", "": "bin"}
"""Endings of files, by the type of the image, where they differ from it."""


class MediaStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[str] = set()
        """Files that exist."""

    def add(self, content: MediaContent) -> dict[str, Any]:
        """Write the content, if it is not there, and describe it for ``read``."""
        record = describe(content)
        for name, frame in zip(record["files"], content.frames, strict=True):
            if name not in self._known:
                self._write(name, frame)
        return record

    def read(self, record: Mapping[str, Any]) -> MediaContent:
        """The content of a record. ``RunError`` if a file is missing or was changed."""
        try:
            frames = [(self._folder / Path(name).name).read_bytes() for name in record["files"]]
        except OSError as error:
            raise RunError(f"{error.filename}: cannot be read ({error.strerror}); a rollout refers to it") from error
        content = MediaContent.of(record["kind"], frames, record.get("frames_per_s", 0.0))
        if content.digest != record["digest"]:
            raise RunError(
                f"{self._folder / record['files'][0]}: is not the {record['kind']} that was written; restore it"
            )
        return content

    def _write(self, name: str, frame: bytes) -> None:
        path = self._folder / name
        if not path.exists():
            # Another thread, or another process such as `headwater eval`, may write the same file.
            temporary = self._folder / f".{name}.{uuid.uuid4().hex}"
            try:
                self._folder.mkdir(exist_ok=True)
                temporary.write_bytes(frame)
                temporary.replace(path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                if (full := disk_full(error, path, "an image")) is not None:
                    raise full from error
                raise
        self._known.add(name)


def describe(content: MediaContent) -> dict[str, Any]:
    """The kind, the digest and the file names of a content, which identify it."""
    is_video = content.kind == "video"
    names = [
        f"{content.digest}{f'.{number}' if is_video else ''}.{_ending(frame)}"
        for number, frame in enumerate(content.frames)
    ]
    record = {"kind": content.kind, "digest": content.digest, "files": names}
    return {**record, "frames_per_s": content.frames_per_s} if is_video else record


def placed_to_json(item: PlacedMedia) -> dict[str, Any]:
    """An item of a sequence, without its content: what ``describe`` says, and its ``blocks`` of tokens."""
    blocks = [{"start": each.start, "length": each.length, "grid": list(each.grid), "time_step": each.time_step}
              for each in item.blocks]  # fmt: skip
    return {**describe(item.content), "blocks": blocks}


def placed_from_json(record: Mapping[str, Any], content: MediaContent) -> PlacedMedia:
    blocks = (
        MediaBlock(each["start"], each["length"], tuple(each["grid"]), each["time_step"]) for each in record["blocks"]
    )
    return PlacedMedia(content, tuple(blocks))


def media_to_json(media: Media) -> list[dict[str, Any]]:
    return [placed_to_json(item) for item in media]


def _ending(frame: bytes) -> str:
    kind = image_type(frame)
    return _ENDINGS.get(kind, kind)
