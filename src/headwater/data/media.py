"""One image or video of a row: a path, a URL, bytes, pixels, or an object that holds one of them and its own settings.

A row is only read here when its prompt is built. What was loaded is kept in a ``MediaCache``, because a row is built
when its length is measured and again in every epoch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from headwater.config.schema import DataConfig
from headwater.core.byte_cache import ByteCache
from headwater.core.errors import DataError
from headwater.core.media import MediaContent
from headwater.core.registry import nearest
from headwater.data.media_source import SourceRules, find_source, is_array, read_source, source_key
from headwater.data.pictures import MAX_SOURCE_PIXELS, PictureLimits, SizeCheck, encode_picture, open_picture
from headwater.data.videos import MAX_FRAMES_PER_S, MIN_FRAMES_PER_S, FrameRate, decode_video, evenly

if TYPE_CHECKING:
    from PIL.Image import Image

SOURCE_KEYS = {
    "image": ("image", "image_url", "bytes", "path", "url", "base64"),
    "video": ("frames", "video", "video_url", "bytes", "path", "url", "base64"),
}
"""Where a part or an object keeps its image or video, in the order in which they are looked for."""
_PIXEL_KEYS = ("min_pixels", "max_pixels")
SETTING_KEYS = {"image": _PIXEL_KEYS, "video": (*_PIXEL_KEYS, "max_frames", "fps")}
"""Settings of a single item. Other loaders have more of them, which are refused and not ignored."""
_SETTINGS_OF_ALL = {
    "image": "data.min_image_pixels or data.max_image_pixels",
    "video": "data.max_image_pixels, data.video_frames_per_s or data.max_video_frames",
}
_IGNORED_KEYS = {"image": ("type", "detail"), "video": ("type",)}
"""``detail`` is how large OpenAI's models see an image. Its values do not say how many pixels that is."""

_CACHE_BYTES = 256 << 20
_ENTRY_BYTES = 512
"""What an entry of a cache needs besides its frames, about."""
_FRAME_BYTES = 48
"""What a frame needs besides its bytes."""

PROCESSOR_ERRORS = (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, OSError)
"""What a processor raises for images and videos that it does not take, or that do not fit the text."""

MediaCache: TypeAlias = ByteCache[Hashable, MediaContent]


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

    def rules(self, folder: Path | None) -> SourceRules:
        """What may be read for a value whose relative paths start at ``folder``."""
        return SourceRules(folder, self.allow_files, self.allow_remote)


def media_cache(max_bytes: int = _CACHE_BYTES) -> MediaCache:
    return ByteCache(max_bytes, size_in_memory)


def size_in_memory(content: MediaContent) -> int:
    """In bytes, about. Without the constants, a cache would keep any number of tiny contents."""
    return _ENTRY_BYTES + sum(_FRAME_BYTES + len(frame) for frame in content.frames)


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
    source = find_source(value, where, settings.rules(folder), "image")

    def load() -> MediaContent:
        data = read_source(source, where)
        return MediaContent.of("image", [encode_picture(data, where, settings.limits, settings.check)])

    return load() if cache is None else cache.get_or_load(("image", settings.limits, source_key(source, where)), load)


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
    if isinstance(value, (list, tuple)) or is_array(value):
        if len(value) == 0:
            raise DataError(f"{where}: the video has no frames; add frames, or remove it")
        kept = evenly(len(value), settings.rate.max_frames)
        frames = [load_image(value[each], f"{where} frame {each}", folder, settings, cache) for each in kept]
        encoded = [frame.frames[0] for frame in frames]
        _check_frame_sizes(encoded, kept, where)
        return MediaContent.of("video", encoded, settings.rate.frames_per_s * len(kept) / len(value))
    if isinstance(value, str) and value.startswith("data:"):
        raise DataError(f"{where}: a video in a data URL is not supported; give a path, or a list of frames")
    source = find_source(value, where, settings.rules(folder), "video")

    def load() -> MediaContent:
        data = read_source(source, where)
        if not isinstance(data, bytes):
            raise DataError(f"{where}: one image is not a video; give a list of frames")
        frames, frames_per_s = decode_video(data, where, settings.rate, encode)
        _check_frame_sizes(frames, range(len(frames)), where)
        return MediaContent.of("video", frames, frames_per_s)

    def encode(frame: Image) -> bytes:
        return encode_picture(frame, where, settings.limits, settings.check)

    if cache is None:
        return load()
    return cache.get_or_load(("video", settings.limits, settings.rate, source_key(source, where)), load)


def unwrapped(value: Any, kind: str, where: str, settings: MediaSettings) -> tuple[Any, MediaSettings]:
    """The image or video in an object, and the settings with those of the object; another value as it is.

    An object may hold another one, as in ``{"image_url": {"url": ...}}``. The layout of ``datasets.Image`` is one of
    these: where both bytes and a path are given, the path is only the name of the original file.
    """
    while isinstance(value, Mapping):
        item = keys_with_values(value)
        check_keys(item, kind, where)
        settings = _with_settings_of(item, where, settings)
        key = next((key for key in SOURCE_KEYS[kind] if key in item), None)
        value = item[key] if key is not None else None
        if key == "base64":
            value = f"data:;base64,{value}"
    return value, settings


def keys_with_values(item: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value. All rows of a Parquet column have the same keys, and null or empty texts in those
    that say nothing."""

    def is_empty(value: Any) -> bool:
        return value is None or (isinstance(value, str) and not value)

    return {
        key: value
        for key, value in item.items()
        if not (all(map(is_empty, value.values())) if isinstance(value, Mapping) else is_empty(value))
    }


def check_keys(item: Mapping[str, Any], kind: str, where: str) -> None:
    sources, settings = SOURCE_KEYS[kind], SETTING_KEYS[kind]
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


def _rate(value: Any, where: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not MIN_FRAMES_PER_S <= value <= MAX_FRAMES_PER_S:
        raise DataError(
            f"{where}: fps = {value!r}; must be a number of frames per second from {MIN_FRAMES_PER_S:g} to "
            f"{MAX_FRAMES_PER_S:g}"
        )
    return float(value)


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
