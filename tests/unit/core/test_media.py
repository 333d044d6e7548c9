"""Media of a sequence: what tells two pictures with equal placeholder tokens apart, and rotary positions."""

from __future__ import annotations

import io

import numpy as np
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


def test_text_after_a_block_continues_after_its_larger_side():
    media = (placed(b"a", MediaBlock(2, 6, (1, 2, 3))), placed(b"b", MediaBlock(9, 4, (2, 2, 1), time_step=5.0)))
    positions = rotary_positions(15, media)
    assert positions[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 11, 11, 8, 9]
    assert positions[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 6, 7, 8, 9]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 6, 8, 9]
    assert rotary_shift(media) == positions[0, -1] - 14
    assert (rotary_positions(5, ()) == np.arange(5)).all()
    without_grid = (placed(b"a", MediaBlock(1, 2)),)
    assert (rotary_positions(5, without_grid) == np.arange(5)).all()
    assert rotary_shift(without_grid) == 0


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
