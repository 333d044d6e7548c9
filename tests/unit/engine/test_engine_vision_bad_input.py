"""Media that an engine cannot serve: the request fails with the reason, and nothing else does."""

from __future__ import annotations

import asyncio
import gc
import io
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from cases import case
from engine.engine_parts import LIMIT_S, assert_nothing_is_held, collect, run, until
from engine.engine_parts import running as running_text
from engine.vision_parts import asking, make_model, picture, processor_of, running
from PIL import Image
from tiny import tokenizer

from headwater.config.schema import EngineConfig
from headwater.core.errors import RequestError, RolloutFailed
from headwater.core.media import MediaBlock, MediaContent
from headwater.engine.engine import Engine
from headwater.engine.media_reader import MediaReader
from headwater.engine.tower import PackedTower

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
    "long time": (
        with_blocks(BLOCK._replace(grid=(2, 2, 1), time_step=2040.0)),
        r"its videos it needs 20\d\d rotary positions, and the model has 2048; use shorter videos",
    ),
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
    is_reading, go_on = threading.Event(), threading.Event()
    read = MediaReader._read

    def slow(reader, content):
        is_reading.set()
        go_on.wait(LIMIT_S)
        return read(reader, content)

    monkeypatch.setattr(MediaReader, "_read", slow)
    with running(NAME) as engine:
        futures = {}

        def ask(name):
            futures[name] = threading.Thread(target=lambda: answers.update({name: engine.generate([GOOD])[0]}))
            futures[name].start()

        answers: dict[str, object] = {}
        ask("aborted")
        assert is_reading.wait(LIMIT_S)
        until(lambda: engine.metrics().num_waiting == 1, "the request does not arrive")
        assert len(engine.generate([asking(NAME, [])])[0].output_tokens) == 8
        assert engine.metrics().num_waiting == 1
        assert engine.abort(GOOD.request_id) == 1
        futures["aborted"].join(LIMIT_S)
        assert answers["aborted"].stop_reason == "abort"
        ask("paused")
        engine.pause()
        go_on.set()
        engine.resume()
        futures["paused"].join(LIMIT_S)
        assert len(answers["paused"].output_tokens) == 8
        assert_nothing_is_held(engine)


def test_a_picture_of_a_palette_is_read_as_a_processor_reads_it(engine):
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(1).frames[0])).convert("P").save(file, "PNG")
    content = MediaContent.of("image", [file.getvalue()])
    assert len(engine.generate([with_content(content)])[0].output_tokens) == 8
    assert processor_of(NAME).inputs(content)["pixel_values"].isfinite().all()


def test_pixels_are_read_only_after_the_blocks_were_compared(engine, monkeypatch):
    """Headers are enough for that. Otherwise a small request could make the engine read gigabytes for nothing."""
    read = []
    monkeypatch.setattr(MediaReader, "_read", lambda _, content: read.append(content))
    with pytest.raises(RequestError, match="but the model makes 12 tokens"):
        engine.generate([with_content(picture(5, 112, 84))])
    file = io.BytesIO()
    Image.new("1", (8192, 8192)).save(file, "PNG")
    huge = MediaContent.of("video", [file.getvalue()] * 17, 2.0)
    assert sum(map(len, huge.frames)) < 2**18
    with pytest.raises(RequestError, match=f"has {17 * 2**26} pixels in 17 frames: at most {2**30} are read; scale"):
        engine.generate([with_content(huge)])
    assert not read


def test_a_picture_that_failed_once_is_read_again(engine, monkeypatch):
    family, errors = type(processor_of(NAME).family), [MemoryError("for a moment")]
    inputs = family.level_inputs

    def failing(own, content):
        if errors:
            raise errors.pop()
        return inputs(own, content)

    monkeypatch.setattr(family, "level_inputs", failing)
    request = with_content(picture(40))
    with pytest.raises(RequestError, match="cannot be read: MemoryError: for a moment"):
        engine.generate([request])
    assert len(engine.generate([request])[0].output_tokens) == 8


def test_files_of_pictures_are_not_kept(engine):
    gone = []

    class File(bytes):
        def __del__(self):
            gone.append(1)

    content = MediaContent.of("image", [File(picture(41).frames[0])])
    engine.generate([with_content(content)])
    del content
    until(lambda: gone or gc.collect() < 0, "the file is kept")


def test_tensors_of_a_picture_are_made_once_for_its_turn(monkeypatch):
    """However little of them is kept: once when it is read, and once more when the tower needs it."""
    with running(NAME) as engine:
        made = []
        processor = engine._media.processor
        monkeypatch.setattr(processor._cache, "max_bytes", 0)
        inputs = processor.family.level_inputs
        counted = lambda _, content: made.append(1) or inputs(content)  # noqa: E731
        monkeypatch.setattr(type(processor.family), "level_inputs", counted)
        engine.generate([with_content(picture(42))])
        assert len(made) == 2


@pytest.mark.parametrize("scores", [False, True])
def test_a_picture_that_is_too_much_for_the_tower_fails_its_requests_alone(scores, monkeypatch):
    """Of a batch of the tower, only that picture fails. Rows that were running and the rest of the batch go on."""
    large = picture(43, 112, 84)
    good = [asking(NAME, [picture(key)], key, prompt_logprobs=scores) for key in (1, 2)]
    good += [asking(NAME, [], 3), asking(NAME, [picture(1)], 4, max_new_tokens=40)]
    bad = [asking(NAME, [picture(1), large], key, prompt_logprobs=scores) for key in (5, 6)]
    with running(NAME) as engine:
        expected = [each.output_tokens for each in engine.generate(good)]
    of_inputs = PackedTower.of_inputs

    def limited(tower, inputs):
        if any(len(each["pixel_levels"]) > 16 for each in inputs):
            raise torch.OutOfMemoryError("no memory for so many patches")
        return of_inputs(tower, inputs)

    monkeypatch.setattr(PackedTower, "of_inputs", limited)

    async def all_of_them(engine):
        return await asyncio.gather(*map(engine.agenerate, [*good, *bad]), return_exceptions=True)

    with running(NAME) as engine:
        *answers, first, second = run(all_of_them(engine))
        assert [each.output_tokens for each in answers] == expected
        for error in (first, second):
            assert isinstance(error, RequestError)
            assert f"image {large.digest[:12]} cannot be computed: OutOfMemoryError: no memory" in str(error)
        assert engine.metrics().num_failed == 2
        assert_nothing_is_held(engine)


def test_no_request_is_lost_if_one_cannot_enter_after_it_was_read(monkeypatch):
    go_on, errors = threading.Event(), {}
    read = MediaReader._read
    monkeypatch.setattr(MediaReader, "_read", lambda *given: go_on.wait(LIMIT_S) and read(*given))
    with running(NAME) as engine:

        def ask(key):
            try:
                engine.generate([asking(NAME, [picture(44)], key)])
            except RolloutFailed as error:
                errors[key] = str(error)

        def enter(sequence):
            raise ValueError("not today")

        callers = [threading.Thread(target=ask, args=[key], daemon=True) for key in range(3)]
        for each in callers:
            each.start()
        until(lambda: engine.metrics().num_waiting == len(callers), "the requests do not arrive")
        monkeypatch.setattr(engine._loop, "_enter", enter)
        go_on.set()
        for each in callers:
            each.join(LIMIT_S)
        assert sorted(errors) == [0, 1, 2]
        assert all("not today" in each for each in errors.values())


def test_callers_that_wait_for_pictures_do_not_outlive_the_reader(monkeypatch):
    """Those whose picture has not begun to be read learn that the engine is closed. So do those that come later."""
    go_on, begun, errors = threading.Event(), threading.Semaphore(0), []
    read = MediaReader._read

    def slow(reader, content):
        begun.release()
        go_on.wait(LIMIT_S)
        read(reader, content)

    monkeypatch.setattr(MediaReader, "_read", slow)
    reader = MediaReader(processor_of(NAME), uses_grid=True, max_positions=2048)

    def ask(request):
        try:
            reader.read(request)
        except RolloutFailed as error:
            errors.append(str(error))

    num_threads = reader._threads._max_workers
    requests = [with_content(picture(50 + number)) for number in range(num_threads + 2)]
    callers = [threading.Thread(target=ask, args=[each], daemon=True) for each in requests]
    for each in callers:
        each.start()
    for _ in range(num_threads):
        assert begun.acquire(timeout=LIMIT_S)
    until(lambda: reader._threads._work_queue.qsize() == 2, "the others do not arrive")
    reader.close()
    until(lambda: len(errors) == 2, "the others wait for ever")
    assert errors == ["request 1 pictures/0: the engine is closed"] * 2
    go_on.set()
    for each in callers:
        each.join(LIMIT_S)
        assert not each.is_alive()
    with pytest.raises(RolloutFailed, match="the engine is closed"):
        reader.read(GOOD)


def test_a_closed_engine_says_so_for_pictures_as_well():
    with running(NAME) as engine:
        engine.close()
        with pytest.raises(RolloutFailed, match="the engine is closed"):
            engine.generate([GOOD])
        assert engine._intake.num_open == 0


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
