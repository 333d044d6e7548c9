"""Media that an engine cannot serve: the request fails with the reason, and nothing else does."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from cases import case
from engine.engine_parts import assert_nothing_is_held, collect, run
from engine.engine_parts import running as running_text
from engine.vision_parts import asking, make_model, picture, processor_of, running
from PIL import Image
from tiny import tokenizer

from headwater.config.schema import EngineConfig
from headwater.core.errors import RequestError
from headwater.core.media import MediaBlock, MediaContent
from headwater.engine.engine import Engine
from headwater.engine.media_reader import MediaReader

NAME = "qwen2_5_vl"
GOOD = asking(NAME, [picture(1)])
[ITEM] = GOOD.media
[BLOCK] = ITEM.blocks


@pytest.fixture(scope="module")
def engine():
    with running(NAME) as engine:
        yield engine


def with_blocks(*blocks: MediaBlock):
    return replace(GOOD, media=(replace(ITEM, blocks=blocks),))


def with_content(content: MediaContent):
    return replace(GOOD, media=(replace(ITEM, content=content),))


WRONG = {
    "no tokens": (with_blocks(BLOCK._replace(length=0)), "has a block of 0 tokens"),
    "negative start": (with_blocks(BLOCK._replace(start=-1)), "has a block of 4 tokens at -1"),
    "other grid": (with_blocks(BLOCK._replace(grid=(1, 3, 2))), "block of 4 tokens with a grid of 1 × 3 × 2"),
    "no grid": (with_blocks(BLOCK._replace(grid=(0, 0, 0))), "with a grid of 0 × 0 × 0"),
    "huge time": (with_blocks(BLOCK._replace(time_step=1e30)), r"step of 1e\+30"),
    "no number": (with_blocks(BLOCK._replace(time_step=float("nan"))), "step of nan"),
    "twice": (replace(GOOD, media=(ITEM, ITEM)), "must be in the order of their tokens"),
    "no digest": (with_content(replace(ITEM.content, digest="zz")), "has no valid digest"),
    "no frames": (with_content(replace(ITEM.content, frames=())), "has 0 frames"),
}
UNREADABLE = {
    "corrupt": (with_content(MediaContent.of("image", [b"not a picture"])), "cannot be read: UnidentifiedImageError"),
    "cut off": (with_content(MediaContent.of("image", [ITEM.content.frames[0][:500]])), "cannot be read"),
    "another digest": (with_content(replace(ITEM.content, digest=picture(2).digest)), "has a digest of other content"),
    "other picture": (
        with_content(picture(5, 112, 84)),
        r"blocks of image \w{12} are 4 tokens .*, but the model makes 12 tokens .* encode the prompt with",
    ),
    "other shape": (with_blocks(BLOCK._replace(grid=(1, 4, 1))), "4 tokens .1×4×1, step 1., but the model makes"),
}


def test_wrong_media_are_refused_at_once(engine):
    for name, (wrong, message) in WRONG.items():
        with case(name):
            with pytest.raises(RequestError, match=message):
                engine.check(wrong)
            with pytest.raises(RequestError, match=f"request 1 pictures/0: .*{message}"):
                engine.generate([GOOD, wrong])
    assert_nothing_is_held(engine)


def test_unreadable_media_fail_their_request_alone(engine):
    for name, (wrong, message) in UNREADABLE.items():
        with case(name):
            with pytest.raises(RequestError, match=f"request 1 pictures/0: .*{message}"):
                engine.generate([wrong])
            with pytest.raises(RequestError, match=message):
                run(engine.agenerate(wrong))
            with pytest.raises(RequestError, match=message):
                run(collect(engine.astream(wrong)))
    assert len(engine.generate([GOOD])[0].output_tokens) == 8
    assert engine.metrics().num_failed >= len(UNREADABLE)
    assert_nothing_is_held(engine)


def test_a_model_for_text_names_itself_and_the_picture():
    with running_text() as engine:
        assert not engine.capabilities.media
        small = replace(GOOD, input_tokens=(7,) * len(GOOD.input_tokens))
        with pytest.raises(RequestError, match=r"contains image \w{12}, but .*qwen3.* takes only text; use a vision"):
            engine.generate([small])


def test_a_vision_model_without_its_processor_takes_only_text():
    engine = Engine(make_model(NAME), tokenizer(), EngineConfig(kv_cache_gib=0.01))
    with pytest.raises(RequestError, match="takes only text"):
        engine.check(GOOD)
    engine.close()


def test_requests_whose_pictures_are_being_read_can_be_aborted_and_left(monkeypatch):
    """Reading takes as long as the test wants. Requests without pictures do not wait for it."""
    go_on = threading.Event()
    read = MediaReader._read

    def slow(reader, content):
        go_on.wait(60)
        return read(reader, content)

    monkeypatch.setattr(MediaReader, "_read", slow)
    with running(NAME) as engine:
        futures = {}

        def ask(name):
            futures[name] = threading.Thread(target=lambda: answers.update({name: engine.generate([GOOD])[0]}))
            futures[name].start()

        answers: dict[str, object] = {}
        ask("aborted")
        assert len(engine.generate([asking(NAME, [])])[0].output_tokens) == 8
        assert engine.metrics().num_waiting == 1
        assert engine.abort(GOOD.request_id) == 1
        futures["aborted"].join(60)
        assert answers["aborted"].stop_reason == "abort"
        ask("paused")
        engine.pause()
        go_on.set()
        engine.resume()
        futures["paused"].join(60)
        assert len(answers["paused"].output_tokens) == 8
        assert_nothing_is_held(engine)


def test_a_picture_of_a_palette_is_read_as_a_processor_reads_it(engine):
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(1).frames[0])).convert("P").save(file, "PNG")
    content = MediaContent.of("image", [file.getvalue()])
    assert len(engine.generate([with_content(content)])[0].output_tokens) == 8
    assert processor_of(NAME).inputs(content)["pixel_values"].isfinite().all()


@pytest.mark.slow
def test_a_text_model_needs_no_pillow():
    program = """
import sys
sys.modules["PIL"] = None
import headwater.backends.hf
from headwater.config.schema import EngineConfig
from headwater.engine.engine import Engine
Engine.load("tiny:qwen3", EngineConfig(kv_cache_gib=0.01), device="cpu").close()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
