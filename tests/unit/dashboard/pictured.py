"""Rollouts with images, written as a run writes them."""

from __future__ import annotations

import io
from dataclasses import replace

import tiny
from dashboard.parts import trajectory
from PIL import Image

from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.core.records import Trajectory
from headwater.observe.media_store import MediaStore
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.tables import write_rollouts


def picture(colour: str, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (12, 8), colour).save(stream, kind)
    return stream.getvalue()


RED, SHOWN_LATER = (MediaContent.of("image", [picture(*each)]) for each in (("red",), ("blue", "JPEG")))
FILM = MediaContent.of("video", [picture("green"), picture("white")], 2.0)


def with_pictures(uid: str, sample: int) -> Trajectory:
    """An image in the prompt, and an image and a video that a tool has returned."""
    plain = trajectory(uid, sample, 0.5, 0)
    told = plain.tokens.index(plain.tokens[-1], plain.prompt_length)
    content = [{"type": "image"}, {"type": "text", "text": "<b>What</b> is it?"}]
    shown = [{"type": "image", "digest": SHOWN_LATER.digest}, {"type": "video", "digest": FILM.digest}]
    messages = ({"role": "user", "content": content}, *plain.messages[1:2], {"role": "tool", "content": shown})
    media = (
        PlacedMedia(RED, (MediaBlock(1, 3),)),
        PlacedMedia(SHOWN_LATER, (MediaBlock(told - 6, 1), MediaBlock(told - 4, 2))),
        PlacedMedia(FILM, (MediaBlock(told - 2, 2),)),
    )
    return replace(plain, messages=messages, media=media)


def save_pictures(run: RunDirectory, step: int, num_samples: int = 2) -> None:
    prompt = tiny.prompt("Question 0", uid="row/0")
    rollouts = [(prompt, with_pictures(prompt.uid, sample)) for sample in range(num_samples)]
    path = run.path / "rollouts" / f"step_{step:06d}.parquet"
    write_rollouts(path, step, rollouts, {}, MediaStore(run.media))
