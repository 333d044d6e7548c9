"""What the images of one client may cost: pixels, and the time of other clients."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from contextvars import copy_context
from functools import lru_cache
from typing import Any

import pytest
from engine.engine_parts import LIMIT_S, run
from PIL import Image

from headwater.core.media import MediaContent
from headwater.core.protocols import EngineLimits
from headwater.models.load import load_processor, load_tokenizer
from headwater.serving import media, reading
from headwater.serving.errors import ApiError
from headwater.serving.media import encode_media, take_media
from headwater.serving.prompt import ModelLimits
from headwater.serving.reading import BodyReader, ClientLeft
from headwater.serving.sglang.generate import read_generate

MODEL = "tiny:qwen2_5_vl"


@lru_cache
def limits(model: str = MODEL) -> ModelLimits:
    return ModelLimits(load_tokenizer(model), EngineLimits(516, 128, 128, 32), processor=load_processor(model))


def png(side: int = 56) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(stream, "PNG")
    return stream.getvalue()


def chat(*sides: int, **more: Any) -> list[dict[str, Any]]:
    urls = [f"data:image/png;base64,{base64.b64encode(png(side)).decode()}" for side in sides]
    return [{"role": "user", "content": [{"type": "image", "image": url, **more} for url in urls]}]


def test_a_client_cannot_raise_the_limits_of_an_image() -> None:
    _, (content,) = take_media(chat(8, min_pixels=30_000_000), limits(), "messages")
    width, height = content.images()[0].size
    assert width * height <= 1 << 20
    _, (content,) = take_media(chat(56, max_pixels=100), limits(), "messages")
    assert content.images()[0].size == (10, 10)


def test_the_pixels_of_a_request_are_limited(monkeypatch) -> None:
    monkeypatch.setattr(media, "MAX_REQUEST_PIXELS", 3 * 56 * 56)
    assert len(take_media(chat(56, 56, 56), limits(), "messages")[1]) == 3
    with pytest.raises(ApiError, match=r"messages\[0\].content\[3\]: the pictures of a request have more than 9408"):
        take_media(chat(56, 56, 56, 56), limits(), "messages")
    image, mark = base64.b64encode(png()).decode(), "<|image_pad|>"
    batch = {"text": [mark * 2] * 2, "image_data": [[image] * 2] * 2}
    with pytest.raises(ApiError, match=r"image_data\[1\]\[0\].content\[1\]: the pictures of a request have more than"):
        read_generate(batch, limits())


def test_numbers_that_the_processor_cannot_use_are_refused() -> None:
    endless = MediaContent.of("video", [png()], 1e-300)
    with pytest.raises(ApiError, match="messages: the model's processor refuses the images"):
        encode_media("<video>", [endless], limits("tiny:smolvlm"), "messages")


class LeavesLater(threading.Event):
    """A client that disconnects after it was looked for three times."""

    num_looks = 0

    def is_set(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 3


def test_no_more_images_are_loaded_for_a_client_that_has_left() -> None:
    context = copy_context()
    context.run(reading._client_left.set, LeavesLater())
    with pytest.raises(ClientLeft):
        context.run(take_media, chat(*[56] * 10), limits(), "messages")


def test_texts_do_not_wait_for_images(monkeypatch) -> None:
    go_on, num_loading = threading.Event(), threading.Semaphore(0)

    def load(*arguments: Any, **options: Any) -> Any:
        num_loading.release()
        assert go_on.wait(LIMIT_S)
        return load_message_media(*arguments, **options)

    load_message_media = media.load_message_media
    monkeypatch.setattr(media, "load_message_media", load)

    async def scenario() -> None:
        reader = BodyReader(max_bytes=2**20, limit_s=LIMIT_S)
        try:
            images = [
                asyncio.create_task(reader.in_thread(lambda: take_media(chat(56), limits(), "messages")[1]))
                for _ in range(20)
            ]
            for _ in range(4):
                assert await asyncio.to_thread(num_loading.acquire, timeout=LIMIT_S)
            async with asyncio.timeout(LIMIT_S):
                assert await reader.in_thread(lambda: limits().tokens_of_text("abc", "text"))
            assert not any(task.done() for task in images)
            go_on.set()
            assert [len(each) for each in await asyncio.gather(*images)] == [1] * 20
        finally:
            go_on.set()
            reader.close()

    run(scenario())
