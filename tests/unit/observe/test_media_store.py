"""A store keeps every content once, and gives it back."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from headwater.core.errors import RunError
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.observe.media_store import MediaStore, media_to_json, placed_from_json

PNG, JPEG = b"\x89PNG a picture", b"\xff\xd8\xff another"


def test_contents_are_written_once_and_read_back(tmp_path):
    store = MediaStore(tmp_path / "media")
    image = MediaContent.of("image", [PNG])
    video = MediaContent.of("video", [JPEG, PNG, JPEG], 2.5)
    records = [json.loads(json.dumps(store.add(each))) for each in (image, video)]
    names = sorted(path.name for path in (tmp_path / "media").iterdir())
    frames = [f"{video.digest}.0.jpg", f"{video.digest}.1.png", f"{video.digest}.2.jpg"]
    assert names == sorted([f"{image.digest}.png", *frames])
    assert [MediaStore(tmp_path / "media").read(each) for each in records] == [image, video]
    before = [os.stat(tmp_path / "media" / name).st_mtime_ns for name in names]
    for again in (store, MediaStore(tmp_path / "media")):  # also in a process that resumes the run
        again.add(image)
        again.add(video)
    assert [os.stat(tmp_path / "media" / name).st_mtime_ns for name in names] == before


def test_threads_may_write_the_same_content(tmp_path):
    store, start = MediaStore(tmp_path / "media"), Barrier(8)

    def add(content: MediaContent) -> None:
        start.wait(60)
        store.add(content)

    contents = [MediaContent.of("image", [PNG + bytes([number]) * 2**16]) for number in range(50)]
    with ThreadPoolExecutor(8) as threads:
        for content in contents:
            list(threads.map(add, [content] * 8))
    assert len(list((tmp_path / "media").iterdir())) == len(contents)
    assert [store.read(store.add(each)) for each in contents] == contents


def test_places_go_through_json():
    placed = PlacedMedia(MediaContent.of("image", [PNG]), (MediaBlock(3, 4, (1, 2, 2), 0.5), MediaBlock(9, 2)))
    (record,) = json.loads(json.dumps(media_to_json((placed,))))
    assert placed_from_json(record, placed.content) == placed


def test_a_missing_or_changed_file_is_named(tmp_path):
    store = MediaStore(tmp_path / "media")
    record = store.add(MediaContent.of("image", [PNG]))
    path = tmp_path / "media" / record["files"][0]
    path.write_bytes(JPEG)
    with pytest.raises(RunError, match=rf"{path.name}: is not the image that was written; restore it"):
        store.read(record)
    path.unlink()
    with pytest.raises(RunError, match=rf"{path.name}: cannot be read \(No such file"):
        store.read(record)
    with pytest.raises(RunError, match="cannot be read"):  # a name never leaves the folder
        store.read({**record, "files": ["../../../etc/passwd"]})
