"""The transformers backend with vision models, against the embedded engine and a full forward pass."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine.engine_parts import running as running_text
from engine.vision_parts import NAMES, asking, full_pass, generated, make_model, picture, processor_of, running, video

from headwater.backends.hf import HfEngine
from headwater.config.schema import EngineConfig
from headwater.core.errors import RequestError
from headwater.core.media import MediaContent
from headwater.observe.spans import Spans

ONE, OTHER, WIDE = picture(1), picture(2), picture(3, 112, 84)


def generate(engine, requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.agenerate(each) for each in requests))

    return asyncio.run(all_of_them())


def hf_engine(name):
    processor = processor_of(name)
    model = make_model(name)
    return HfEngine(model, processor.tokenizer, max_batch_sequences=64, spans=Spans(), processor=processor)


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_it_equals_the_embedded_engine_and_transformers(name):
    """Groups with the same pictures share a call. Calls with and without pictures follow one another."""
    greedy = asking(name, [ONE, WIDE], temperature=0.0)
    asked = [asking(name, [ONE, WIDE], key, text="Why?" * key) for key in range(3)]
    asked += [asking(name, [], 4), asking(name, [OTHER], 5), replace(asking(name, [ONE], 6), given_tokens=(9, 10))]
    engine = hf_engine(name)
    assert engine.capabilities.media
    responses = generate(engine, [greedy, *asked]) + generate(engine, [asking(name, [], 7), asking(name, [], 8)])
    engine.close()
    asked = [greedy, *asked, asking(name, [], 7), asking(name, [], 8)]
    assert list(responses[0].output_tokens) == generated(name, greedy)
    for request, response in zip(asked, responses, strict=True):
        assert response.output_logprobs == pytest.approx(full_pass(name, request, response), abs=1e-4)
    with running(name) as embedded:
        others = embedded.generate(asked)
    assert [each.output_tokens for each in responses] == [each.output_tokens for each in others]


def test_text_continues_after_the_last_time_of_a_video():
    """Prompts of different lengths in one call. The second time of the video is 200 positions after the first."""
    name = NAMES[0]
    long = video(1, num_frames=4, frames_per_s=0.04)
    asked = [asking(name, [long], key, text="Why?" * key) for key in range(3)]
    asked += [replace(asking(name, [ONE, long], 6), given_tokens=(9, 10)), asking(name, [long], 7, temperature=0.0)]
    engine = hf_engine(name)
    responses = generate(engine, asked)
    engine.close()
    for request, response in zip(asked, responses, strict=True):
        assert response.output_logprobs == pytest.approx(full_pass(name, request, response), abs=1e-4)
    assert list(responses[-1].output_tokens) == generated(name, asked[-1])
    with running(name) as embedded:
        others = embedded.generate(asked)
    assert [each.output_tokens for each in responses] == [each.output_tokens for each in others]


def test_what_it_cannot_serve_is_refused():
    name = NAMES[0]
    engine = hf_engine(name)
    good = asking(name, [ONE])
    mark = good.input_tokens[good.media[0].blocks[0].start]
    broken = replace(good, media=(replace(good.media[0], content=MediaContent.of("image", [b"nothing"])),))
    for wrong, message in (
        (replace(good, given_tokens=(9, mark)), f"token {mark} at position .* is text here"),
        (broken, "cannot be read"),
        (replace(good, input_tokens=good.input_tokens[: good.media[0].end]), "the prompt ends with media"),
        (replace(good, media=(replace(good.media[0], content=WIDE),)), "encode the prompt with the model's own"),
    ):
        with pytest.raises(RequestError, match=message):
            generate(engine, [wrong])
    assert len(generate(engine, [good])[0].output_tokens) == 8
    engine.close()


def test_a_text_model_refuses_pictures():
    with running_text() as text:
        engine = HfEngine(text._model, text.tokenizer, max_batch_sequences=4, spans=Spans())
        assert not engine.capabilities.media
        good = asking(NAMES[0], [ONE])
        with pytest.raises(RequestError, match="takes only text"):
            engine.check(replace(good, input_tokens=(7,) * len(good.input_tokens)))
        engine.close()


@pytest.mark.slow
def test_loaded_by_name_both_engines_take_pictures():
    name = NAMES[0]
    asked = asking(name, [ONE], temperature=0.0)
    engine = HfEngine.load(f"tiny:{name}", EngineConfig(), dtype="float32", device="cpu")
    [response] = generate(engine, [asked])
    engine.close()
    from headwater.engine.engine import Engine

    embedded = Engine.load(f"tiny:{name}", EngineConfig(kv_cache_gib=0.02), dtype="float32", device="cpu")
    assert embedded.generate([asked])[0].output_tokens == response.output_tokens
    embedded.close()
