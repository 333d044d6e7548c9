"""Prompts and episodes of ``tiny:qwen2_5_vl`` with small pictures."""

from __future__ import annotations

import io
import threading
from functools import lru_cache

from workflows.episodes import ListedRewards
from workflows.scripted_engine import ScriptedEngine

from headwater.chat.render import render_chat
from headwater.core.media import MediaContent
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Prompt
from headwater.core.requests import SamplingParams
from headwater.models.load import load_processor
from headwater.workflows import Episode, WorkflowContext


@lru_cache(maxsize=1)
def processor():
    return load_processor("tiny:qwen2_5_vl")


def picture(color: str, size: tuple[int, int] = (56, 56)):
    from PIL import Image

    return Image.new("RGB", size, color)


def watched(color: str, threads: list[threading.Thread]):
    """A picture that notes the threads in which its pixels are read."""
    from PIL import Image

    class Watched(Image.Image):
        def load(self):
            threads.append(threading.current_thread())
            return super().load()

    made = picture(color)
    made.__class__ = Watched
    return made


def png(color: str, size: tuple[int, int] = (56, 56)) -> bytes:
    stream = io.BytesIO()
    picture(color, size).save(stream, "png")
    return stream.getvalue()


def content(color: str, size: tuple[int, int] = (56, 56)) -> MediaContent:
    return MediaContent.of("image", [png(color, size)])


def data_config(**settings):
    from headwater.config.schema import DataConfig

    return DataConfig(train=(), **settings)


def encode(text: str) -> tuple[int, ...]:
    return tuple(processor().tokenizer.encode(text, add_special_tokens=False))


def end() -> int:
    return processor().tokenizer.eos_token_id


def answer(text: str) -> tuple[int, ...]:
    return (*encode(text), end())


def prompt(*contents: MediaContent, text: str = "What is this?", **fields) -> Prompt:
    parts = [*({"type": each.kind} for each in contents), {"type": "text", "text": text}]
    messages = ({"role": "user", "content": parts},)
    tools = list(fields.get("tool_schemas", ()))
    rendered = render_chat(processor().template, messages, {"tools": tools} if tools else {})
    tokens, media = processor().encode(rendered, list(contents))
    given = {"data_source": "arithmetic", "ground_truth": "46", **fields}
    return Prompt("row", messages, rendered, tokens, media=media, **given)


def episode_of(*answers: tuple[int, ...], shown: Prompt | None = None, rewards=(), max_new_tokens: int = 100, **fields):
    engine = ScriptedEngine(answers, end(), version=3)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    context = WorkflowContext(
        processor().tokenizer, ListedRewards(rewards), sampling, **{"processor": processor(), **fields}
    )
    return Episode(context, engine, EpisodeInput(shown or prompt(content("red")), sample=1, rng_key=7))
