"""Other threads read prompts with pictures, in the order of the sampler. The event loop continues meanwhile."""

from __future__ import annotations

import asyncio
import io
import itertools
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.data import prompt_builder
from headwater.data.load import prompts_of
from headwater.data.rlhf_dataset import RLHFDataset
from headwater.rollout.group import PromptDraw, UnreadableRow
from headwater.rollout.source import _READ_TOGETHER, PromptStream

LIMIT_S = 60.0
NUM_ROWS = 40


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (56, 28), (6 * number, 0, 0)).save(file, "png")
    return file.getvalue()


def rows(num_rows: int = NUM_ROWS) -> list[dict]:
    return [{"prompt": "<image>?", "images": [png(number)]} for number in range(num_rows)]


@pytest.fixture
def stream(tokenizer, processor):
    def make(source: list[dict], **options: bool) -> PromptStream:
        config = DataConfig(truncation="left")  # "filter" would read all pictures at the start
        dataset = RLHFDataset([source], config, tokenizer, processor=processor)
        return PromptStream(dataset, seed=3, shuffle=True, **options)

    return make


def test_the_loop_goes_on_while_pictures_are_read(stream, monkeypatch):
    """Every picture waits for the event loop, which a picture that is read on the loop would wait for in vain."""
    seen, load = threading.Event(), prompt_builder.load_image

    def load_later(*arguments):
        assert seen.wait(LIMIT_S), "the event loop stands still"
        return load(*arguments)

    async def take(prompts: PromptStream) -> int:
        reading = asyncio.ensure_future(prompts.read_ahead(NUM_ROWS, at_least=1))
        await asyncio.sleep(0)
        seen.set()
        return await reading

    prompts = stream(rows())
    monkeypatch.setattr(prompt_builder, "load_image", load_later)
    assert asyncio.run(take(prompts)) == _READ_TOGETHER
    monkeypatch.setattr(prompt_builder, "load_image", None)
    assert len(prompts.take(_READ_TOGETHER)) == _READ_TOGETHER, "they are built already"


def test_prompts_that_were_read_ahead_are_those_of_the_stream(stream):
    plain, ahead = stream(rows()), stream(rows())

    async def take_all() -> list:
        taken = []
        while len(taken) < 2 * NUM_ROWS:  # across the end of an epoch
            count = await ahead.read_ahead(2 * NUM_ROWS - len(taken), at_least=1)
            taken += ahead.take(count)
        return taken

    assert asyncio.run(take_all()) == plain.take(2 * NUM_ROWS)
    assert not ahead._prepared


def test_what_was_prepared_may_be_taken_at_once(stream):
    prompts = stream(rows())

    async def prepare() -> int:
        prompts.prepare(NUM_ROWS)
        assert prompts._reads_all is not None
        await prompts._reads_all
        return await prompts.read_ahead(NUM_ROWS, at_least=1)

    assert asyncio.run(prepare()) == NUM_ROWS


def test_the_time_that_groups_waited_for_pictures_is_a_metric(stream, tokenizer, monkeypatch):
    """Reading while nothing waits is no wait, and a step without pictures has no such metric."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks))  # every look is a second
    monkeypatch.setattr("headwater.rollout.source.time", clock)
    prompts = stream(rows())

    async def take_all() -> list[dict]:
        prompts.prepare(20)
        assert prompts._reads_all is not None
        await prompts._reads_all
        taken = prompts.take(20)
        told = [prompts.metrics(each.prompt for each in taken)]
        for _ in range(2):
            taken = prompts.take(await prompts.read_ahead(10, at_least=1))
        return [*told, *(prompts.metrics(each.prompt for each in taken) for _ in range(2))]

    assert asyncio.run(take_all()) == [{"time/media_wait_s": waited_s} for waited_s in (0, 2, 0)]
    text = PromptStream(RLHFDataset([[{"prompt": "a"}, {"prompt": "b"}]], DataConfig(), tokenizer), 3, shuffle=True)
    assert text.metrics(each.prompt for each in text.take(2)) == {}


def test_a_picture_that_cannot_be_read_is_an_error_when_its_prompt_is_taken(stream):
    broken = rows()
    broken[7]["images"] = [b"no picture"]
    prompts = stream(broken)

    async def take_all() -> None:
        for _ in range(NUM_ROWS):
            prompts.take(await prompts.read_ahead(1, at_least=1))

    with pytest.raises(DataError, match=r"row 7: images\[0\]"):
        asyncio.run(take_all())


def test_rows_that_cannot_be_read_are_given_with_their_errors_in_the_order_of_the_stream(stream, tmp_path, monkeypatch):
    sources = [{"prompt": "<image>?", "images": [str(tmp_path / f"{number}.png")]} for number in range(NUM_ROWS)]
    for number in range(NUM_ROWS):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    whole = stream(sources).take(2 * NUM_ROWS)
    (tmp_path / "7.png").unlink()
    (tmp_path / "11.png").write_bytes(b"no picture")
    tries: Counter[str] = Counter()
    load = prompt_builder.load_image

    def count(value, *rest):
        tries[Path(value).name] += 1
        return load(value, *rest)

    monkeypatch.setattr(prompt_builder, "load_image", count)
    prompts = stream(sources, gives_unreadable=True)

    async def take(num_rows: int) -> list[PromptDraw]:
        taken: list[PromptDraw] = []
        while len(taken) < num_rows:
            taken += prompts.take(await prompts.read_ahead(num_rows - len(taken), at_least=1))
        return taken

    taken = asyncio.run(take(NUM_ROWS))
    places = [(draw.index, draw.epoch, draw.uid, draw.rng_key) for draw in whole]
    assert [(draw.index, draw.epoch, draw.uid, draw.rng_key) for draw in taken] == places[:NUM_ROWS]
    broken = {draw.index: draw.row for draw in taken if isinstance(draw.row, UnreadableRow)}
    assert set(broken) == {7, 11}
    assert "row 7: images[0]: no such file" in str(broken[7].error)
    assert "row 11: images[0]: not a readable image" in str(broken[11].error)
    assert (tries["7.png"], tries["11.png"]) == (1, 1), "a thread has read it, and the event loop does not again"
    with pytest.raises(DataError, match="row 7"):
        _ = taken[next(at for at, draw in enumerate(taken) if draw.index == 7)].prompt
    for number in (7, 11):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    assert asyncio.run(take(NUM_ROWS)) == whole[NUM_ROWS:], "in the next epoch, the files are back"
    assert [draw.row for draw in stream(sources, gives_unreadable=True).take(NUM_ROWS)] == [
        draw.row for draw in whole[:NUM_ROWS]
    ]


def test_rows_of_an_evaluation_are_read_by_threads_in_order(tokenizer, processor, tmp_path: Path, monkeypatch):
    threads, load = set(), prompt_builder.load_image

    def note(*arguments):
        threads.add(threading.current_thread().name)
        return load(*arguments)

    monkeypatch.setattr(prompt_builder, "load_image", note)
    dataset = RLHFDataset([rows()], DataConfig(truncation="left"), tokenizer, processor=processor)
    read = prompts_of(dataset, range(NUM_ROWS))
    assert threading.current_thread().name not in threads
    assert read == [dataset[number] for number in range(NUM_ROWS)]
    text = RLHFDataset([[{"prompt": "a"}, {"prompt": "b"}]], DataConfig(), tokenizer)
    assert [prompt.text for prompt in prompts_of(text, range(2))] == [text[0].text, text[1].text]
