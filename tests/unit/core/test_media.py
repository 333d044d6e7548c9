"""Media of a sequence: what tells two pictures with equal placeholder tokens apart, and rotary positions."""

from __future__ import annotations

import io
import math

import numpy as np
from cases import case
from PIL import Image

from headwater.core.media import (
    MediaBlock,
    MediaContent,
    PlacedMedia,
    identity_tokens,
    image_type,
    rotary_positions,
    rotary_shift,
)

PAD = 7


def placed(content: bytes, *blocks: MediaBlock) -> PlacedMedia:
    return PlacedMedia(MediaContent.of("image", [content]), blocks)


def test_equal_placeholders_of_two_pictures_differ():
    tokens = [1, PAD, PAD, PAD, PAD, 2]
    block = MediaBlock(1, 4)
    first, again, other = (identity_tokens(tokens, (placed(each, block),)) for each in (b"a", b"a", b"b"))
    assert (first == again).all()
    assert (first[1:5] != other[1:5]).all()
    assert (first[1:5] < 0).all()
    assert first[[0, 5]].tolist() == [1, 2]
    assert len(set(first[1:5].tolist())) == 4
    assert identity_tokens(tokens, ()).tolist() == tokens


def test_text_after_a_block_continues_after_its_largest_position():
    media = (placed(b"a", MediaBlock(2, 6, (1, 2, 3))), placed(b"b", MediaBlock(9, 4, (2, 2, 1), time_step=5.0)))
    positions = rotary_positions(15, media)
    assert positions[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 11, 11, 12, 13]
    assert positions[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 6, 7, 12, 13]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 6, 12, 13]
    assert rotary_shift(media) == 13 - 14
    assert (rotary_positions(5, ()) == np.arange(5)).all()
    without_grid = (placed(b"a", MediaBlock(1, 2)),)
    assert (rotary_positions(5, without_grid) == np.arange(5)).all()
    assert rotary_shift(without_grid) == 0


def test_positions_of_videos_are_those_of_the_authors_of_qwen2_5_vl():
    """The positions of videos of a given grid and time step: the largest of each axis, and the text after them."""
    for name, start, grid, time_step, largest, text in (
        ("the example of the model's source", 0, (3, 2, 2), 50.0, (100, 1, 1), 101),
        ("two minutes, printed by transformers 5.2", 15, (84, 12, 16), 4.0, (347, 26, 30), 348),
        ("64 frames, two per second", 0, (32, 20, 36), 2.0, (62, 19, 35), 63),
        ("sides larger than the time", 7, (2, 3, 5), 2.0, (9, 9, 11), 12),
        ("time as large as a side", 0, (3, 5, 4), 2.0, (4, 4, 3), 5),
        ("rounded down: 0, 2.7, 5.3, 8", 1, (4, 2, 2), 8 / 3, (9, 2, 2), 10),
        ("rounded down: 0, 0.6, 1.2, 1.8", 0, (4, 1, 1), 0.6, (1, 0, 0), 2),
        ("one time", 3, (1, 2, 4), 1000.0, (3, 4, 6), 7),
    ):
        with case(name):
            length = math.prod(grid)
            media = (placed(b"a", MediaBlock(start, length, grid, time_step)),)
            positions = rotary_positions(start + length + 2, media)
            assert positions[:, start].tolist() == [start] * 3
            assert positions[:, start : start + length].max(axis=1).tolist() == list(largest)
            assert positions[:, start + length :].tolist() == [[text, text + 1]] * 3
            assert rotary_shift(media) == text - start - length


def test_videos_and_images_follow_one_another():
    blocks = MediaBlock(1, 2, (2, 1, 1), 7.5), MediaBlock(4, 4, (1, 2, 2)), MediaBlock(8, 2, (2, 1, 1), 3.0)
    media = tuple(placed(b"a", each) for each in blocks)
    positions = rotary_positions(12, media)
    assert positions[0].tolist() == [0, 1, 8, 9, 10, 10, 10, 10, 12, 15, 16, 17]
    assert positions[1].tolist() == [0, 1, 1, 9, 10, 10, 11, 11, 12, 12, 16, 17]
    assert positions[2].tolist() == [0, 1, 1, 9, 10, 11, 10, 11, 12, 12, 16, 17]
    assert rotary_shift(media) == 6


def test_moved_media_keep_their_content():
    item = placed(b"a", MediaBlock(2, 3), MediaBlock(6, 1))
    moved = item.moved(10)
    assert moved.places().tolist() == [12, 13, 14, 16]
    assert (moved.end, moved.num_tokens, moved.content) == (17, 4, item.content)


def test_the_type_of_an_image_is_told_by_how_it_begins():
    for kind in ("png", "jpeg", "webp", "gif", "bmp", "tiff"):
        stream = io.BytesIO()
        Image.new("RGB", (4, 4)).save(stream, kind)
        assert image_type(stream.getvalue()) == kind
    assert [image_type(each) for each in (b"", b"<svg>", b"RIFF\0\0\0\0WAVE")] == [""] * 3
