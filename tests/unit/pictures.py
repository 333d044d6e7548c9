"""Rows with pictures, for tests of vision models."""

from __future__ import annotations

import io
import random
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from headwater.core.media import Media, MediaContent
from headwater.core.records import Trajectory
from headwater.models.load import load_model, load_processor
from headwater.models.vision import VisionProcessor

NAME = "tiny:qwen2_5_vl"
NUM_TEXT_TOKENS = 512
"""Tokens of the tiny vocabulary that are not special tokens of vision models."""


@cache
def processor(name: str = NAME) -> VisionProcessor:
    made = load_processor(name)
    assert made is not None
    return made


def model(name: str = NAME, seed: int = 0) -> Any:
    return load_model(name, dtype="float32", device="cpu", seed=seed)


def picture(seed: int, width: int = 56, height: int = 56) -> MediaContent:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return MediaContent.of("image", [file.getvalue()])


def video(seed: int, num_frames: int = 4) -> MediaContent:
    return MediaContent.of("video", [picture(seed + number).frames[0] for number in range(num_frames)], 2.0)


def encoded(contents: list[MediaContent], text: str = "what?", name: str = NAME) -> tuple[tuple[int, ...], Media]:
    # Transformers cannot tell two pictures apart that stand directly beside each other.
    places = " and ".join(processor(name).family.placeholder(each.kind) for each in contents)
    return processor(name).encode(places + text, contents)


def trajectory(
    seed: int,
    contents: list[MediaContent],
    *,
    uid: str = "row",
    sample: int = 0,
    later: list[MediaContent] | None = None,
    name: str = NAME,
) -> Trajectory:
    """A prompt with pictures and a random response. ``later`` are pictures that a tool returned in the middle of it."""
    rng = random.Random(seed)

    def reply(num_tokens: int) -> list[int]:
        return [rng.randrange(6, NUM_TEXT_TOKENS) for _ in range(num_tokens)]

    prompt, media = encoded(contents, name=name)
    response, mask = reply(rng.randint(2, 6)), []
    mask = [1] * len(response)
    if later:
        between, shown = encoded(later, "go on", name)
        media += tuple(item.moved(len(prompt) + len(response)) for item in shown)
        last = reply(rng.randint(2, 5))
        response += [*between, *last]
        mask += [0] * len(between) + [1] * len(last)
    mask = [0] * len(prompt) + mask
    return Trajectory(
        uid=uid,
        sample=sample,
        tokens=(*prompt, *response),
        prompt_length=len(prompt),
        loss_mask=tuple(mask),
        logprobs=tuple(-rng.random() if kept else 0.0 for kept in mask),
        versions=tuple(0 if kept else -1 for kept in mask),
        reward=rng.random(),
        stop_reason="stop",
        media=media,
    )


def group(seed: int, contents: list[MediaContent], num_samples: int, **fields: Any) -> list[Trajectory]:
    return [
        trajectory(100 * seed + sample, contents, uid=f"group{seed}", sample=sample, **fields)
        for sample in range(num_samples)
    ]


def plain_logprobs(rows: list[Trajectory], width: int, model: Any, name: str = NAME) -> torch.Tensor:
    """``[rows, width]``: log-probs of the trained tokens by a forward pass of transformers for each row."""
    return torch.stack([_plain_row(each, width, model, name) for each in rows])


def _plain_row(row: Trajectory, width: int, model: Any, name: str) -> torch.Tensor:
    tokens = torch.tensor(row.tokens)
    logits = model(**processor(name).model_inputs(row.tokens, row.media)).logits[0, :-1]
    scores = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    scores = scores * torch.tensor(row.loss_mask[1:])
    response = scores[row.prompt_length - 1 :]
    return torch.nn.functional.pad(response, (0, width - len(response)))
