"""Videos in files: which frames are taken, and how they are decoded.

Pillow decodes animated GIF, WebP and PNG files. Everything else needs the package ``av`` (PyAV).
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headwater.core.errors import DataError
from headwater.data.pictures import FORMATS, check_size, guarded, import_pillow

if TYPE_CHECKING:
    from PIL.Image import Image

_DEFAULT_FRAME_S = 0.1
"""Browsers show a frame of an animation that states no duration for this long."""
_SAME_TIME_S = 1e-6
MIN_FRAMES_PER_S, MAX_FRAMES_PER_S = 1e-6, 1e6
"""Rates outside of these are mistakes, and the times of their frames are too large for the positions of tokens."""

Frame = TypeVar("Frame")
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class FrameRate:
    """How densely a video is sampled."""

    frames_per_s: float = 2.0
    max_frames: int = 64

    def num_frames(self, duration_s: float) -> int:
        return max(1, min(self.max_frames, round(duration_s * self.frames_per_s)))


def evenly(num_all: int, max_frames: int) -> list[int]:
    """At most ``max_frames`` of the numbers from 0, at equal distances."""
    num_kept = min(num_all, max_frames)
    return [number * num_all // num_kept for number in range(num_kept)]


def decode_video(data: bytes, where: str, rate: FrameRate, encode: Callable[[Image], Kept]) -> tuple[list[Kept], float]:
    """What ``encode`` makes of frames of a file at equal distances of time, and how many there are per second.

    One frame is decoded at a time, because all of them may need far more memory than their file.
    """
    import_pillow(where)
    from PIL import Image, UnidentifiedImageError

    try:
        animation = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        return _decode_with_av(data, where, rate, encode)
    except Exception as error:  # for a damaged file, decoders raise errors of many kinds
        raise DataError(f"{where}: not a readable video ({error}); fix or remove it") from error
    check_size(animation.size, where)
    return guarded(lambda: _sampled_animation(animation, rate, encode), where)


def _sampled_animation(animation: Any, rate: FrameRate, encode: Callable[[Image], Kept]) -> tuple[list[Kept], float]:
    durations = []
    for number in range(getattr(animation, "n_frames", 1)):
        animation.seek(number)
        animation.load()  # WebP states the duration of a frame only after decoding it
        durations.append((animation.info.get("duration") or 1000 * _DEFAULT_FRAME_S) / 1000)
    duration_s = sum(durations)
    starts = itertools.accumulate(durations, initial=0.0)
    num_frames = rate.num_frames(duration_s)
    frames = []
    for number in sampled(zip(starts, range(len(durations)), strict=False), duration_s, num_frames):
        animation.seek(number)
        frames.append(encode(animation.convert("RGBA" if animation.has_transparency_data else "RGB")))
    return frames, num_frames / duration_s


def sampled(frames: Iterable[tuple[float, Frame]], duration_s: float, num_frames: int) -> Iterator[Frame]:
    """For every one of ``num_frames`` equal parts of the duration, the frame that is shown when it begins.

    ``frames`` are given with the times at which they begin, in order. The first one begins at 0.
    """
    times = (number * duration_s / num_frames + _SAME_TIME_S for number in range(num_frames))
    time_s = next(times)
    shown: Frame | None = None
    for start_s, frame in frames:
        while shown is not None and time_s < start_s:
            yield shown
            if (time_s := next(times, math.inf)) == math.inf:
                return
        shown = frame
    while shown is not None and time_s < math.inf:
        yield shown
        time_s = next(times, math.inf)


def _decode_with_av(
    data: bytes, where: str, rate: FrameRate, encode: Callable[[Image], Kept]
) -> tuple[list[Kept], float]:
    try:
        import av
    except ImportError as error:
        raise DataError(
            f"{where}: reading a video from a file needs PyAV; pip install headwater[video], or give a list of frames"
        ) from error
    try:
        times = _frame_times(av, data)
        if not times:
            raise DataError(f"{where}: the file has no video; give an image or a video")
        span_s = times[-1] - times[0]
        duration_s = span_s + span_s / max(1, len(times) - 1) or 1 / rate.frames_per_s
        num_frames = rate.num_frames(duration_s)
        with av.open(io.BytesIO(data)) as container:
            codec = container.streams.video[0].codec_context
            check_size((codec.width, codec.height), where)
            # Only the frames that are kept are converted.
            taken = sampled(_timed_frames(container, times[0]), duration_s, num_frames)
            frames = [encode(_upright(frame)) for frame in taken]
    except (av.error.FFmpegError, ValueError) as error:
        raise DataError(f"{where}: not a readable video ({error}); fix or remove it") from error
    if not frames:
        raise DataError(f"{where}: not a readable video (no frame can be decoded); fix or remove it")
    return frames, num_frames / duration_s


def _frame_times(av: Any, data: bytes) -> list[float]:
    """The times of all frames, from the file's index of packets: headers often state a wrong duration, or none."""
    with av.open(io.BytesIO(data)) as container:
        if not container.streams.video:
            return []
        stream = container.streams.video[0]
        found = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
        return sorted(float(pts * stream.time_base) for pts in found)


def _timed_frames(container: Any, start_s: float) -> Iterator[tuple[float, Any]]:
    for frame in container.decode(container.streams.video[0]):
        if frame.time is not None:
            yield frame.time - start_s, frame


def _upright(frame: Any) -> Image:
    """Phones store a video as the sensor saw it, and how to turn it counterclockwise."""
    image: Image = frame.to_image()
    turn = getattr(frame, "rotation", 0)
    return image.rotate(turn, expand=True) if turn else image
