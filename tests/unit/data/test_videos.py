from __future__ import annotations

import io
import sys
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_multimodal_rows import build, colors, picture, png

from headwater.core.errors import DataError
from headwater.data import media
from headwater.data.media import MediaSettings, load_video
from headwater.data.pictures import encode_picture
from headwater.data.videos import FrameRate, decode_video, evenly, sampled


def animation(colors, duration, file_format="GIF"):
    stream = io.BytesIO()
    first, *others = (picture(color) for color in colors)
    first.save(stream, file_format, save_all=True, append_images=others, duration=duration, lossless=True)
    return stream.getvalue()


def shown(content):
    return [image.getpixel((0, 0)) for image in content.images()]


def test_videos_as_frames_or_arrays(tokenizer, processor):
    rows = [
        {"prompt": "<video>", "videos": [[picture("red"), png("blue")]]},
        {"prompt": "<video>", "videos": [np.zeros((3, 28, 28, 3), np.uint8)]},
        {"prompt": "<video>", "videos": [{"frames": [png("blue"), png("red")], "fps": 8}]},
        {"prompt": [{"role": "user", "content": [{"type": "video", "video": [png("lime")], "fps": 3}]}]},
        {"prompt": "<video>?", "videos": [animation(["red", "lime"], 500)]},
    ]
    frames, array, rated, inline, file = build(rows, tokenizer, processor)
    assert colors(frames) == ["red"]
    assert [item.content.kind for item in frames.media] == ["video"]
    assert shown(frames.media[0].content) == [(255, 0, 0), (0, 0, 255)]
    assert frames.media[0].content.frames_per_s == 2.0
    assert frames.text == "[user]<|video_pad|><|end|>[assistant]"
    assert len(array.media[0].content.frames) == 3
    assert rated.media[0].content.frames_per_s == 8.0
    assert inline.media[0].content.frames_per_s == 3.0
    assert shown(file.media[0].content) == [(255, 0, 0), (0, 255, 0)]
    for prompt in (frames, array, rated, inline, file):
        assert prompt.media[0].num_tokens > 0


def test_images_and_videos_in_one_prompt(tokenizer, processor):
    row = {"prompt": "<video><image>", "images": [png("blue")], "videos": [[png("red")]]}
    prompt = build([row], tokenizer, processor)[0]
    assert [item.content.kind for item in prompt.media] == ["video", "image"]
    assert colors(prompt) == ["red", "blue"]


def test_long_lists_lose_frames_at_equal_distances():
    settings = MediaSettings(rate=FrameRate(frames_per_s=4.0, max_frames=3))
    content = load_video([np.full((4, 4, 3), shade, np.uint8) for shade in range(6)], "here", None, settings)
    assert shown(content) == [(0,) * 3, (2,) * 3, (4,) * 3]
    assert content.frames_per_s == 2.0


def test_a_video_may_ask_for_fewer_frames_but_not_for_more():
    settings = MediaSettings(rate=FrameRate(frames_per_s=2.0, max_frames=3))
    shades = [np.full((4, 4, 3), shade, np.uint8) for shade in range(6)]
    gif = animation(["red", "lime", "blue", "red"], [500] * 4)
    for asked, num_frames in ((1, 1), (2, 2), (3, 3), (768, 3)):
        listed = load_video({"video": shades, "max_frames": asked, "fps": 6}, "here", None, settings)
        assert shown(listed) == [(number * 6 // num_frames,) * 3 for number in range(num_frames)]
        assert listed.frames_per_s == num_frames
        assert len(load_video({"bytes": gif, "max_frames": asked}, "here", None, settings).frames) == num_frames
    for wrong in (0, True, 1.5, "2"):
        with pytest.raises(DataError, match=rf"here: max_frames = {wrong!r}; must be a whole number >= 1"):
            load_video({"video": shades, "max_frames": wrong}, "here", None, settings)


def test_frames_of_different_sizes_are_refused(tokenizer, processor):
    frames = [picture("red", (56, 56)), picture("red", (56, 56)), picture("blue", (280, 28))]
    for row, place in (
        ({"prompt": "<video>", "videos": [frames]}, r"videos\[0\]"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": frames}]}]}, r"prompt\[0\].content\[0\]"),
    ):
        with pytest.raises(
            DataError, match=rf"row 0: {place} frame 2: 280 x 28 pixels, and frame 0 has 56 x 56, .*give all frames"
        ):
            build([row], tokenizer, processor)
    almost = [picture("red", (56, 56)), picture("red", (56, 55))]
    with pytest.raises(DataError, match="here frame 1: 56 x 55 pixels, and frame 0 has 56 x 56"):
        load_video(almost, "here", None)
    # Only frames that are used are compared, and they are named by their number in the row.
    assert len(load_video({"frames": frames, "max_frames": 2}, "here", None).frames) == 2
    frames = [frames[0], frames[2], frames[2], frames[0]]
    with pytest.raises(DataError, match="here frame 2: 280 x 28 pixels, and frame 0 has 56 x 56"):
        load_video({"frames": frames, "max_frames": 2}, "here", None)


@given(st.integers(1, 200), st.integers(1, 64))
def test_evenly(num_all, max_frames):
    kept = evenly(num_all, max_frames)
    assert len(kept) == min(num_all, max_frames)
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] < num_all


def test_the_frame_that_is_shown_at_a_time():
    frames = [(0.0, "a"), (0.5, "b"), (2.0, "c")]
    assert list(sampled(frames, 4.0, 4)) == ["a", "b", "c", "c"]
    assert list(sampled(frames, 4.0, 8)) == ["a", "b", "b", "b", "c", "c", "c", "c"]
    assert list(sampled(frames, 4.0, 1)) == ["a"]
    assert list(sampled([], 4.0, 2)) == []


def color(image):
    return image.convert("RGB").getpixel((0, 0))


def test_animations_are_sampled_by_time():
    for file_format in ("GIF", "WEBP", "PNG"):
        data = animation(["red", "lime", "blue"], [1000, 500, 500], file_format)
        shades, rate = decode_video(data, "here", FrameRate(2.0), color)
        assert shades == [(255, 0, 0)] * 2 + [(0, 255, 0), (0, 0, 255)]
        assert rate == pytest.approx(2.0)
        shades, rate = decode_video(data, "here", FrameRate(2.0, max_frames=2), color)
        assert shades == [(255, 0, 0), (0, 255, 0)]
        assert rate == pytest.approx(1.0)


def test_one_frame_at_a_time_is_in_memory(monkeypatch):
    data = animation(["red", "lime", "blue", "red"], [500] * 4, "GIF")
    frames, num_alive = [], []

    def encode(frame, *arguments):
        num_alive.append(sum(each() is not None for each in frames))
        frames.append(weakref.ref(frame))
        return encode_picture(frame, *arguments)

    monkeypatch.setattr(media, "encode_picture", encode)
    assert len(load_video(data, "here", None).frames) == 4
    assert num_alive == [0] * 4


def test_files_need_a_decoder(tmp_path, monkeypatch):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"\x00\x00\x00\x18ftypmp42" + bytes(100))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        DataError, match=r"here: reading a video from a file needs PyAV; pip install headwater.video., or give"
    ):
        load_video(str(path), "here", None)


def test_files_with_a_decoder(tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number in range(20):
            frame = av.VideoFrame.from_image(Image.new("L", (64, 64), 10 * number).convert("RGB"))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    content = load_video(str(path), "here", None, MediaSettings(rate=FrameRate(2.0)))
    assert content.frames_per_s == pytest.approx(2.0)
    assert np.allclose([red for red, _, _ in shown(content)], [0, 50, 100, 150], atol=8)
    damaged = path.read_bytes()[:200]
    with pytest.raises(DataError, match="here: not a readable video"):
        load_video(damaged, "here", None)


def test_bad_videos():
    with pytest.raises(DataError, match="here: a video in a data URL is not supported; give a path"):
        load_video("data:video/mp4;base64,AAAA", "here", None)
    with pytest.raises(DataError, match=r"here: nframes is not supported; did you mean 'max_frames'\?.*; remove it"):
        load_video({"frames": [png("red")], "nframes": 3}, "here", None)
    with pytest.raises(DataError, match="here: not a readable image"):
        load_video(animation(["red", "blue"], 500)[:-30], "here", None)
    with pytest.raises(DataError, match=r"'https://host/a.mp4' is not read over the network"):
        load_video("https://host/a.mp4", "here", None)
