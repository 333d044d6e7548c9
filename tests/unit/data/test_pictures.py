from __future__ import annotations

import io
import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headwater.core.errors import DataError
from headwater.data import media
from headwater.data.media import MediaSettings, load_image, media_cache, size_in_memory
from headwater.data.pictures import MAX_SOURCE_PIXELS, PictureLimits, encode_picture, fitted_size

LIMITS = PictureLimits(0, 10_000)


def encoded(image, file_format, **options):
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def decoded(data):
    return Image.open(io.BytesIO(data))


def half_red(size=(40, 20), mode="RGB"):
    """Red on the left, blue on the right."""
    image = Image.new("RGB", size, "blue")
    image.paste("red", (0, 0, size[0] // 2, size[1]))
    return image.convert(mode)


def png_header(width, height):
    """A PNG file that announces a size and has no pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_files_that_need_no_change_are_kept():
    for file_format, mode in (("PNG", "RGB"), ("PNG", "L"), ("JPEG", "RGB"), ("JPEG", "L"), ("WEBP", "RGB")):
        data = encoded(half_red(mode=mode), file_format)
        assert encode_picture(data, "here", LIMITS) is data


def test_other_files_become_png():
    for file_format, mode in (("BMP", "RGB"), ("GIF", "P"), ("TIFF", "RGB"), ("PNG", "P"), ("PNG", "1"), ("PPM", "L")):
        image = decoded(encode_picture(encoded(half_red(mode=mode), file_format), "here", LIMITS))
        assert (image.format, image.size) == ("PNG", (40, 20))
        assert image.mode in ("RGB", "L")
        expected = half_red(mode=mode).convert(image.mode)
        assert image.getpixel((1, 1)) == expected.getpixel((1, 1))
        assert image.getpixel((38, 1)) == expected.getpixel((38, 1))


def test_transparent_pixels_are_white():
    image = half_red(mode="RGBA")
    image.putpixel((1, 1), (255, 0, 0, 0))
    image.putpixel((2, 2), (0, 0, 0, 128))
    shown = decoded(encode_picture(encoded(image, "PNG"), "here", LIMITS))
    assert [shown.getpixel(place) for place in ((0, 0), (1, 1), (2, 2))] == [(255, 0, 0), (255, 255, 255), (127,) * 3]
    marked = encoded(half_red(), "PNG", transparency=(255, 0, 0))
    assert decoded(encode_picture(marked, "here", LIMITS)).getpixel((0, 0)) == (255, 255, 255)


def test_photographs_are_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees to the left
    data = encoded(half_red(), "JPEG", exif=exif, quality=95)
    upright = decoded(encode_picture(data, "here", LIMITS))
    assert upright.size == (20, 40)
    top, bottom = upright.getpixel((10, 5)), upright.getpixel((10, 35))
    assert top[0] > 200 > 60 > top[2]
    assert bottom[2] > 200 > 60 > bottom[0]
    exif[0x0112] = 1
    data = encoded(half_red(), "JPEG", exif=exif)
    assert encode_picture(data, "here", LIMITS) is data


def test_damaged_metadata_do_not_matter():
    data = encoded(half_red(), "JPEG", exif=b"Exif\x00\x00nonsense")
    assert encode_picture(data, "here", LIMITS) is data


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 2000), st.integers(0, 10**6))
def test_sizes_within_limits(width, height, low, more):
    limits = PictureLimits(low, low + more + 1)
    new_width, new_height = fitted_size((width, height), limits)
    assert min(new_width, new_height) >= 1
    if low <= width * height <= limits.max_pixels:
        assert (new_width, new_height) == (width, height)
    elif width * height > limits.max_pixels:
        assert new_width * new_height <= limits.max_pixels
        assert new_width <= width
        assert new_height <= height
    else:
        assert new_width * new_height >= low


def test_resizing():
    data = encoded(half_red((400, 200)), "JPEG", quality=95)
    small = decoded(encode_picture(data, "here", LIMITS))
    assert (small.format, small.size) == ("PNG", (141, 70))
    assert decoded(encode_picture(data, "here", PictureLimits(200_000, 300_000))).size == (633, 317)


def test_an_item_cannot_exceed_the_limits_of_its_owner(monkeypatch):
    def size(owner, **limits):
        item = {"image": encoded(half_red((40, 20)), "PNG"), **limits}
        width, height = load_image(item, "here", None, MediaSettings(owner)).images()[0].size
        return width * height

    assert size(LIMITS, max_pixels=200) <= 200
    assert size(LIMITS, min_pixels=5000) == pytest.approx(5000, rel=0.05)
    assert size(LIMITS, min_pixels=10**6) == pytest.approx(LIMITS.max_pixels, rel=0.05)
    assert size(PictureLimits(0, 200), max_pixels=10**10) <= 200
    monkeypatch.setattr(media, "MAX_SOURCE_PIXELS", 20_000)
    assert size(PictureLimits(0, 10**7), min_pixels=10**6) == pytest.approx(20_000, rel=0.05)


def test_bombs_are_refused_before_they_are_decoded():
    side = int(MAX_SOURCE_PIXELS**0.5)
    for size in ((side + 1, side + 1), (10**5, 10**5), (2**31 - 1, 2)):
        with pytest.raises(
            DataError, match=r"row 3: images\[0\]: .*larger than 89478485 pixels, so it is not decoded; ma"
        ):
            encode_picture(png_header(*size), "row 3: images[0]", LIMITS)


def test_what_cannot_be_converted_exactly_is_refused_by_name():
    for mode, file_format in (
        ("CMYK", "JPEG"),
        ("CMYK", "TIFF"),
        ("I;16", "PNG"),
        ("I", "TIFF"),
        ("F", "TIFF"),
        ("LAB", "TIFF"),
    ):
        data = encoded(Image.new(mode, (9, 9)), file_format)
        with pytest.raises(
            DataError, match=rf"here: pictures of mode {mode}.* cannot be converted exactly; save it in RGB"
        ):
            encode_picture(data, "here", LIMITS)


def test_unreadable_files():
    whole = {name: encoded(half_red((64, 64)), name) for name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")}
    for data in (
        b"",
        b"text",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        png_header(9, 9),
        png_header(0, 9),
    ):
        with pytest.raises(DataError, match=r"here: .*remove"):
            encode_picture(data, "here", LIMITS)
    for data in whole.values():
        with pytest.raises(DataError, match="here: not a readable image"):
            encode_picture(data[: len(data) // 2], "here", LIMITS)
    damaged = bytearray(whole["PNG"])
    damaged[60] ^= 0xFF
    with pytest.raises(DataError, match="here: not a readable image"):
        encode_picture(bytes(damaged), "here", LIMITS)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("file_format", ["TIFF", "PNG", "GIF", "WEBP", "JPEG"])
def test_damaged_files_are_read_or_refused(file_format):
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = encoded(half_red(), file_format, **({} if file_format == "GIF" else {"exif": exif}))
    rng = random.Random(0)
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            # The headers and tags of these formats are at the beginning or at the end.
            place = rng.randrange(80) if rng.random() < 0.5 else -rng.randrange(1, 160)
            damaged[place % len(damaged)] = rng.randrange(256)
        try:
            encode_picture(bytes(damaged), "here", LIMITS)
        except DataError:
            num_refused += 1
    assert num_refused


def test_an_animation_is_not_an_image():
    data = encoded(half_red(), "GIF", save_all=True, append_images=[Image.new("RGB", (40, 20), "lime")])
    with pytest.raises(DataError, match=r"here: the file has 2 frames; give it as a video, or save one frame"):
        encode_picture(data, "here", LIMITS)


def test_the_cache_keeps_what_was_used_last(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(encoded(Image.effect_noise((50, 50), 40 + number), "PNG"))
    size = max(size_in_memory(load_image(path, "here", None)) for path in paths)
    cache = media_cache(2 * size)

    def load(value):
        return load_image(value, "here", None, None, cache)

    first, second = load(paths[0]), load(paths[1])
    assert load(paths[0]) is first
    assert load(paths[0].read_bytes()) == first
    assert cache.num_bytes <= 2 * size
    load(paths[2])
    assert load(paths[1]) is not second
    assert load(paths[1]) == second
    assert load_image(paths[1], "here", None, MediaSettings(PictureLimits(0, 100)), cache) != second
    paths[1].write_bytes(encoded(Image.new("RGB", (9, 9)), "PNG"))
    assert load(paths[1]).images()[0].size == (9, 9)


def test_a_server_reads_no_files(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(half_red(), "PNG"))
    for value in (str(path), path.as_uri(), {"path": str(path)}):
        with pytest.raises(
            DataError, match=r"here: .*a.png' is not read from the disk of this machine; send a data URL"
        ):
            load_image(value, "here", None, MediaSettings(allow_files=False))


def test_a_file_that_vanishes_while_it_is_looked_at_is_an_error_of_its_row(tmp_path, monkeypatch):
    """A run on a network file system meets this between any two calls."""
    path = tmp_path / "cat.png"
    path.write_bytes(b"")
    monkeypatch.setattr(media, "find_source", lambda *_: (path.unlink(missing_ok=True), path)[1])
    for cache in (None, media_cache()):
        with pytest.raises(DataError, match=r"row 3: images\[0\]: .*cat.png cannot be read .*; check the file"):
            load_image(str(path), "row 3: images[0]", None, cache=cache)


def test_bytes_of_no_image_are_described_in_the_same_words_every_time():
    """The message is part of the ledger, and that of a resumed run must not differ."""
    with pytest.raises(DataError, match=r"not a readable image \(none of the formats PNG, JPEG"):
        load_image(b"no picture", "row 3", None)
