"""One picture: checked, turned upright, converted to 8 bits per channel and resized within limits.

    encoded = encode_picture(path.read_bytes(), "rows.jsonl, line 3: images[0]", PictureLimits(max_pixels=10_000))

A file that needs no change is kept as it is, so that a photograph stays as small as its JPEG file. Everything else
becomes a PNG file.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from headwater.core.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What is opened. Pillow knows more formats, of which some start other programs."""
_KEPT_FORMATS = frozenset({"PNG", "JPEG", "MPO", "WEBP"})
"""Formats that models, servers and browsers read. MPO is a JPEG file with a second picture behind the first."""
_KEPT_MODES = frozenset({"RGB", "L"})
_CONVERTED_MODES = frozenset({"1", "P", "PA", "LA", "RGBA", "RGBX"})
"""Modes whose conversion to 8 bits per channel loses nothing but transparency."""

MAX_SOURCE_PIXELS = 89_478_485
"""A picture with more pixels is not decoded: 256 MiB as RGB. It is the number from which Pillow warns."""
DEFAULT_MAX_PIXELS = 1 << 20

_ORIENTATION_TAG = 0x0112
_UPRIGHT = 1

Result = TypeVar("Result")
SizeCheck = Callable[[tuple[int, int], str], None]
"""Takes width and height of a picture and its place, and raises ``DataError`` if it must not be decoded."""


@dataclass(frozen=True)
class PictureLimits:
    """Sizes of what a model receives. A picture outside of them is resized and keeps its proportions."""

    min_pixels: int = 0
    max_pixels: int = DEFAULT_MAX_PIXELS


def encode_picture(source: bytes | Image, where: str, limits: PictureLimits, check: SizeCheck | None = None) -> bytes:
    """The file of a picture that ``MediaContent`` holds. ``where`` is its place in the data, for messages.

    ``check`` is called before the picture is decoded, ``check_size`` by default.
    """
    import_pillow(where)
    opened = open_picture(source, where) if isinstance(source, bytes) else source
    (check or check_size)(opened.size, where)

    def encode() -> bytes:
        num_frames = getattr(opened, "n_frames", 1)
        if num_frames > 1 and opened.format != "MPO":
            raise DataError(
                f"{where}: the file has {num_frames} frames; give it as a video, or save one frame as an image"
            )
        opened.load()
        image = as_rgb(_upright(opened), where)
        size = fitted_size(image.size, limits)
        is_unchanged = image is opened and size == image.size and opened.format in _KEPT_FORMATS
        return source if is_unchanged and isinstance(source, bytes) else to_png(image, size)

    return guarded(encode, where)


def import_pillow(where: str) -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError(f"{where}: images need Pillow; pip install headwater[vision]") from error


def open_picture(data: bytes, where: str) -> Image:
    """Read the header. The pixels are decoded later, after the size is checked."""
    from PIL import Image, UnidentifiedImageError

    def read() -> Image.Image:
        try:
            return Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:  # its own text names an object of this process, which differs between runs
            raise ValueError(f"none of the formats {', '.join(FORMATS)}") from None

    return guarded(read, where)


def check_size(size: tuple[int, int], where: str) -> None:
    """Refuse a picture that is too large to be decoded: a small file can ask for all of the memory."""
    width, height = size
    if width * height > MAX_SOURCE_PIXELS:
        raise DataError(f"{where}: {width} x {height} pixels: {_too_large()}")
    if not width or not height:
        raise DataError(f"{where}: {width} x {height} pixels: the image is empty; remove the row")


def guarded(decode: Callable[[], Result], where: str) -> Result:
    """Run a decoder on a file that may be damaged."""
    from PIL import Image

    try:
        return decode()
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{where}: {_too_large()} ({error})") from error
    except Exception as error:  # for a damaged file, decoders raise errors of many kinds
        raise DataError(f"{where}: not a readable image ({error}); fix or remove it") from error


def as_rgb(image: Image, where: str) -> Image:
    """The picture in RGB or in grayscale. What is transparent becomes white."""
    from PIL import Image as Pillow

    if image.mode not in _KEPT_MODES and image.mode not in _CONVERTED_MODES:
        raise DataError(
            f"{where}: pictures of mode {image.mode} cannot be converted exactly; save it in RGB or grayscale, with "
            "8 bits per channel"
        )
    if image.has_transparency_data:
        canvas = Pillow.new("RGBA", image.size, "white")
        canvas.alpha_composite(image.convert("RGBA"))
        return canvas.convert("RGB")
    if image.mode in _KEPT_MODES:
        return image
    return image.convert("L" if image.mode in ("1", "LA") else "RGB")


def fitted_size(size: tuple[int, int], limits: PictureLimits) -> tuple[int, int]:
    """The nearest size within the limits that has about the same proportions."""
    width, height = size
    num_pixels = width * height
    if num_pixels > limits.max_pixels:
        scale = math.sqrt(limits.max_pixels / num_pixels)
        width, height = max(1, math.floor(width * scale)), max(1, math.floor(height * scale))
        # A very narrow picture cannot become narrower than one pixel, so it becomes shorter.
        if width <= height:
            return width, min(height, limits.max_pixels // width)
        return min(width, limits.max_pixels // height), height
    if num_pixels < limits.min_pixels:
        scale = math.sqrt(limits.min_pixels / num_pixels)
        return math.ceil(width * scale), math.ceil(height * scale)
    return size


def to_png(image: Image, size: tuple[int, int]) -> bytes:
    from PIL import Image as Pillow

    if size != image.size:
        image = image.resize(size, Pillow.Resampling.BICUBIC)
    stream = io.BytesIO()
    # A quick compression: the file is read a few times and kept only for this run.
    image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def _upright(image: Image) -> Image:
    """Cameras store a picture as the sensor saw it, and how to turn it."""
    from PIL import ImageOps

    try:
        is_upright = image.getexif().get(_ORIENTATION_TAG, _UPRIGHT) == _UPRIGHT
    except (
        SyntaxError,
        ValueError,
        KeyError,
        TypeError,
        OSError,
        struct.error,
    ):  # damaged metadata tell nothing about the orientation of pixels that can be read
        return image
    return image if is_upright else ImageOps.exif_transpose(image)


def _too_large() -> str:
    return f"larger than {MAX_SOURCE_PIXELS} pixels, so it is not decoded; make the image smaller, or remove it"
