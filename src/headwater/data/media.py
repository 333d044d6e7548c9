"""Images and videos of a row: in its columns, or inside the messages as OpenAI and Hugging Face write them.

A row is only read here when its prompt is built. What was loaded is kept in a ``MediaCache``, because a row is built
when its length is measured and again in every epoch.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from headwater.chat.render import Message
from headwater.config.schema import DataConfig
from headwater.core.byte_cache import ByteCache
from headwater.core.disk import cache_dir
from headwater.core.errors import DataError
from headwater.core.media import MediaContent
from headwater.core.registry import nearest
from headwater.data.pictures import (
    MAX_SOURCE_PIXELS,
    PictureLimits,
    SizeCheck,
    encode_picture,
    import_pillow,
    open_picture,
)
from headwater.data.row_store import PlacedRow
from headwater.data.videos import MAX_FRAMES_PER_S, MIN_FRAMES_PER_S, FrameRate, decode_video, evenly

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = {"image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video"}
"""Types of message parts, and what each holds."""
_REFUSED = frozenset({"audio", "audio_url", "input_audio", "file", "input_file"})
_SOURCE_KEYS = {
    "image": ("image", "image_url", "bytes", "path", "url", "base64"),
    "video": ("frames", "video", "video_url", "bytes", "path", "url", "base64"),
}
"""Where a part or an object keeps its image or video, in the order in which they are looked for."""
_PIXEL_KEYS = ("min_pixels", "max_pixels")
_SETTING_KEYS = {"image": _PIXEL_KEYS, "video": (*_PIXEL_KEYS, "max_frames", "fps")}
"""Settings of a single item. Other loaders have more of them, which are refused and not ignored."""
_SETTINGS_OF_ALL = {
    "image": "data.min_image_pixels or data.max_image_pixels",
    "video": "data.max_image_pixels, data.video_frames_per_s or data.max_video_frames",
}
_IGNORED_KEYS = {"image": ("type", "detail"), "video": ("type",)}
"""``detail`` is how large OpenAI's models see an image. Its values do not say how many pixels that is."""

MAX_FILE_BYTES = 1 << 30
_CACHE_BYTES = 256 << 20
_ENTRY_BYTES = 512
"""What an entry of a cache needs besides its frames, about."""
_FRAME_BYTES = 48
"""What a frame needs besides its bytes."""

PROCESSOR_ERRORS = (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, OSError)
"""What a processor raises for images and videos that it does not take, or that do not fit the text."""

MediaCache: TypeAlias = ByteCache[Hashable, MediaContent]

InlineValue = tuple[Any, str]
"""A value inside a message and its place; the value is None where a column holds it."""


@dataclass(frozen=True)
class MediaSettings:
    limits: PictureLimits = field(default_factory=PictureLimits)
    rate: FrameRate = field(default_factory=FrameRate)
    allow_remote: bool = False
    """Whether URLs are read over the network."""
    allow_files: bool = True
    """Whether paths are read. A server must not read them for a client."""
    check: SizeCheck | None = None
    """See ``encode_picture``."""

    @classmethod
    def of(cls, config: DataConfig) -> MediaSettings:
        return cls(
            PictureLimits(config.min_image_pixels, config.max_image_pixels),
            FrameRate(config.video_frames_per_s, config.max_video_frames),
            allow_remote=config.allow_remote_media,
        )


def media_cache(max_bytes: int = _CACHE_BYTES) -> MediaCache:
    return ByteCache(max_bytes, size_in_memory)


def size_in_memory(content: MediaContent) -> int:
    """In bytes, about. Without the constants, a cache would keep any number of tiny contents."""
    return _ENTRY_BYTES + sum(_FRAME_BYTES + len(frame) for frame in content.frames)


def take_inline_media(messages: Sequence[Message], place: str) -> tuple[list[Message], dict[str, list[InlineValue]]]:
    """Take images and videos out of the messages. Every such part becomes ``{"type": "image"}`` or a video.

    The second result has one entry for each part, in order.
    """
    found: dict[str, list[InlineValue]] = {"image": [], "video": []}
    taken: list[Message] = []
    for number, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, list):
            parts = []
            for position, part in enumerate(content):
                where = f"{place}[{number}].content[{position}]"
                if part["type"] in _REFUSED:
                    raise DataError(
                        f"{where}: a part of type {part['type']!r} is not supported; remove it from the row"
                    )
                kind = KINDS.get(part["type"])
                if kind is not None:
                    num_of_column = sum(value is None for value, _ in found[kind])
                    found[kind].append((_inline_value(part, kind, where, num_of_column), where))
                parts.append(part if kind is None else {"type": kind})
            message = {**message, "content": parts}
        taken.append(message)
    return taken, found


def place_media(
    inline: Sequence[InlineValue], placed: PlacedRow, key: str, kind: str, prompt_key: str
) -> list[InlineValue]:
    """The values of one kind with their places, in the order of the prompt. Parts without a value take the column's."""
    values = _as_list(placed.row.get(key))
    num_parts = sum(value is None for value, _ in inline)
    if num_parts != len(values):
        raise DataError(
            f"{placed.place}: {prompt_key} has {num_parts} <{kind}> and {key} holds {len(values)}; "
            f"write one <{kind}> per {kind}, and name their column in data.{kind}_key"
        )
    column = iter([(value, f"{placed.place}: {key}[{number}]") for number, value in enumerate(values)])
    return [next(column) if value is None else (value, where) for value, where in inline]


def _inline_value(part: Mapping[str, Any], kind: str, where: str, number: int) -> Mapping[str, Any] | None:
    """A part as an object that holds its image or video; None if the part takes item ``number`` of the column."""
    # The digest is that of a content which is already loaded. Without such a content it says nothing.
    item = {key: value for key, value in _given(part).items() if key != "digest"}
    if any(key in item for key in _SOURCE_KEYS[kind]):
        _check_keys(item, kind, where)
        return item
    index = item.pop("index", number)
    _check_keys(item, kind, where)
    if part["type"] != kind:
        raise DataError(f"{where}: a part of type {part['type']!r} without a URL; write {{'url': ...}} in it")
    setting = next((key for key in _SETTING_KEYS[kind] if key in item), None)
    if setting is not None:
        raise DataError(
            f"{where}: {setting} in a part without its {kind}; write it in the column: "
            f"{{{kind!r}: ..., {setting!r}: {item[setting]!r}}}"
        )
    if index != number:
        raise DataError(
            f"{where}: index = {index!r}, but the {kind}s of the column are used in order, and this part takes number "
            f"{number}; change the order of the column, and remove the index"
        )
    return None


def _as_list(value: Any) -> list[Any]:
    """The items of a media column. A column with a single image need not wrap it in a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def load_image(
    value: Any,
    where: str,
    folder: Path | None,
    settings: MediaSettings | None = None,
    cache: MediaCache | None = None,
) -> MediaContent:
    """An image from a path, a URL, encoded bytes, a Pillow image, an array, or an object such as ``{"bytes": ...}``.

    ``where`` is its place in the data, for messages. Relative paths start at ``folder``, or at the working directory.
    """
    settings = settings or MediaSettings()
    value, settings = unwrapped(value, "image", where, settings)
    source = _source(value, where, folder, settings, "image")

    def load() -> MediaContent:
        data = _pixels_or_file(source, where)
        return MediaContent.of("image", [encode_picture(data, where, settings.limits, settings.check)])

    return load() if cache is None else cache.get_or_load(("image", settings.limits, _key(source)), load)


def load_video(
    value: Any,
    where: str,
    folder: Path | None,
    settings: MediaSettings | None = None,
    cache: MediaCache | None = None,
) -> MediaContent:
    """A video from a list of frames, an array of frames, ``{"frames": [...], "fps": 2}``, or a file.

    Frames that are given are taken as they are, at ``fps`` or else at ``data.video_frames_per_s``.
    """
    value, settings = unwrapped(value, "video", where, settings or MediaSettings())
    if isinstance(value, (list, tuple)) or _is_array(value):
        if len(value) == 0:
            raise DataError(f"{where}: the video has no frames; add frames, or remove it")
        kept = evenly(len(value), settings.rate.max_frames)
        frames = [load_image(value[each], f"{where} frame {each}", folder, settings, cache) for each in kept]
        encoded = [frame.frames[0] for frame in frames]
        _check_frame_sizes(encoded, kept, where)
        return MediaContent.of("video", encoded, settings.rate.frames_per_s * len(kept) / len(value))
    if isinstance(value, str) and value.startswith("data:"):
        raise DataError(f"{where}: a video in a data URL is not supported; give a path, or a list of frames")
    source = _source(value, where, folder, settings, "video")

    def load() -> MediaContent:
        data = _pixels_or_file(source, where)
        if not isinstance(data, bytes):
            raise DataError(f"{where}: one image is not a video; give a list of frames")
        frames, frames_per_s = decode_video(data, where, settings.rate, encode)
        _check_frame_sizes(frames, range(len(frames)), where)
        return MediaContent.of("video", frames, frames_per_s)

    def encode(frame: Image) -> bytes:
        return encode_picture(frame, where, settings.limits, settings.check)

    return load() if cache is None else cache.get_or_load(("video", settings.limits, settings.rate, _key(source)), load)


def unwrapped(value: Any, kind: str, where: str, settings: MediaSettings) -> tuple[Any, MediaSettings]:
    """The image or video in an object, and the settings with those of the object; another value as it is.

    An object may hold another one, as in ``{"image_url": {"url": ...}}``. The layout of ``datasets.Image`` is one of
    these: where both bytes and a path are given, the path is only the name of the original file.
    """
    while isinstance(value, Mapping):
        item = _given(value)
        _check_keys(item, kind, where)
        settings = _with_settings_of(item, where, settings)
        key = next((key for key in _SOURCE_KEYS[kind] if key in item), None)
        value = item[key] if key is not None else None
        if key == "base64":
            value = f"data:;base64,{value}"
    return value, settings


def _given(item: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value. All rows of a Parquet column have the same keys, and null or empty texts in those
    that say nothing."""

    def is_empty(value: Any) -> bool:
        return value is None or (isinstance(value, str) and not value)

    return {
        key: value
        for key, value in item.items()
        if not (all(map(is_empty, value.values())) if isinstance(value, Mapping) else is_empty(value))
    }


def _check_keys(item: Mapping[str, Any], kind: str, where: str) -> None:
    sources, settings = _SOURCE_KEYS[kind], _SETTING_KEYS[kind]
    for key in item:
        if key not in (*sources, *settings, *_IGNORED_KEYS[kind]):
            # In an object that has its image or video, an unknown key can only be a setting.
            known = settings if any(each in item for each in sources) else (*sources, *settings)
            raise DataError(
                f"{where}: {key} is not supported; {nearest(str(key), list(known))}; remove it, or set "
                f"{_SETTINGS_OF_ALL[kind]} for all rows"
            )


def _with_settings_of(item: Mapping[str, Any], where: str, settings: MediaSettings) -> MediaSettings:
    # An item may come from a client of a server, and must not ask for more memory than its owner allows.
    most_pixels = min(settings.limits.max_pixels, MAX_SOURCE_PIXELS)
    limits = {key: min(_whole_number(item, key, where), most_pixels) for key in _PIXEL_KEYS if key in item}
    rate = settings.rate
    if "fps" in item:
        rate = replace(rate, frames_per_s=_rate(item["fps"], where))
    if "max_frames" in item:
        rate = replace(rate, max_frames=min(_whole_number(item, "max_frames", where), rate.max_frames))
    return replace(settings, limits=replace(settings.limits, **limits), rate=rate)


def _whole_number(item: Mapping[str, Any], key: str, where: str) -> int:
    value = item[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{where}: {key} = {value!r}; must be a whole number >= 1, or be left out")
    return value


def _check_frame_sizes(frames: Sequence[bytes], numbers: Sequence[int], where: str) -> None:
    """A model reads a video in one size, so other frames would be stretched to the size of the first.

    One pixel is a difference, too: a decoder gives all frames of a video the same size, and frames of the same size are
    resized to the same size.
    """
    first, *others = (open_picture(frame, where).size for frame in frames)
    for number, size in zip(numbers[1:], others, strict=True):
        if size != first:
            raise DataError(
                f"{where} frame {number}: {size[0]} x {size[1]} pixels, and frame {numbers[0]} has {first[0]} x "
                f"{first[1]}, within the limits of pixels; give all frames of a video the same size"
            )


def _rate(value: Any, where: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not MIN_FRAMES_PER_S <= value <= MAX_FRAMES_PER_S:
        raise DataError(
            f"{where}: fps = {value!r}; must be a number of frames per second from {MIN_FRAMES_PER_S:g} to "
            f"{MAX_FRAMES_PER_S:g}"
        )
    return float(value)


def _source(value: Any, where: str, folder: Path | None, settings: MediaSettings, kind: str) -> bytes | Path | Image:
    """Where the pixels are: in encoded bytes, in a file, or decoded already."""
    import_pillow(where)
    from PIL import Image

    if isinstance(value, str) and value.startswith("data:"):
        return _decode_data_url(value, where)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (str, Path)):
        return _existing_file(str(value), where, folder, settings)
    if isinstance(value, Image.Image):
        return value
    if _is_array(value):
        return _from_array(value, where)
    hint = "give a path, a data URL, {'bytes': ...}, {'path': ...} or a Pillow image"
    raise DataError(f"{where}: a {type(value).__name__} is not {'an image' if kind == 'image' else 'a video'}; {hint}")


def _key(source: bytes | Path | Image) -> Hashable:
    """The key that identifies a source: path, size and time of a file, a hash of everything else."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).digest()
    if isinstance(source, Path):
        status = source.stat()
        return str(source), status.st_mtime_ns, status.st_size
    return source.mode, source.size, hashlib.sha256(source.tobytes()).digest()


def _pixels_or_file(source: bytes | Path | Image, where: str) -> bytes | Image:
    if not isinstance(source, Path):
        return source
    try:
        if (size := source.stat().st_size) > MAX_FILE_BYTES:
            raise DataError(f"{where}: {source} has {size} bytes, more than {MAX_FILE_BYTES}; make the file smaller")
        return source.read_bytes()
    except OSError as error:
        raise DataError(f"{where}: {source} cannot be read ({error}); check the file") from error


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") and hasattr(value, "shape")


def _from_array(value: Any, where: str) -> Image:
    from PIL import Image

    shape, kind = tuple(value.shape), str(value.dtype)
    if kind != "uint8" or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))):
        raise DataError(
            f"{where}: an array of {kind} with the shape {shape} is not an image; give uint8 values with the shape "
            "(height, width) or (height, width, 3)"
        )
    return Image.fromarray(value)


def _decode_data_url(url: str, where: str) -> bytes:
    header, comma, data = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise DataError(f"{where}: {header[:40]!r} is not a data URL in base64; write 'data:image/png;base64,...'")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: the base64 text of the data URL is damaged ({error}); write it again") from error


def _existing_file(name: str, where: str, folder: Path | None, settings: MediaSettings) -> Path:
    if "://" in name:
        url = urlsplit(name)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            return _fetched(name, where, settings)
        name = unquote(url.path)
    if not settings.allow_files:
        raise DataError(f"{where}: {name[:80]!r} is not read from the disk of this machine; send a data URL")
    tried: Sequence[Path] = [start / Path(name).expanduser() for start in (folder, Path()) if start is not None]
    try:
        for path in tried:
            if path.is_file():
                return path
    except OSError as error:  # for example a name that is too long, because it is not a path
        raise DataError(
            f"{where}: {name[:80]!r} is not a path ({error.strerror}); give a path or a data URL"
        ) from error
    looked = " and ".join(str(path)[:200] for path in tried)
    raise DataError(f"{where}: no such file: {looked}; relative paths start at the data file's folder")


def _fetched(url: str, where: str, settings: MediaSettings) -> Path:
    """A copy of a file elsewhere. The copy is looked up at its source once per process and URL."""
    if not settings.allow_remote or url.startswith("file:"):
        raise DataError(
            f"{where}: {url!r} is not read over the network; download it and give its path, or set "
            "data.allow_remote_media=true"
        )
    from headwater.data.remote import fetch_file  # most rows have local files

    with _fetching:  # one download of a URL, while other threads may download others
        lock = _locks.setdefault(url, threading.Lock())
    with lock:
        if url not in _copies or not _copies[url].is_file():
            try:
                _copies[url] = fetch_file(url, cache_dir() / "media")
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        return _copies[url]


_copies: dict[str, Path] = {}
_fetching = threading.Lock()
_locks: dict[str, threading.Lock] = {}
