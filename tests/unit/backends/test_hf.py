"""The transformers backend, with a real tiny model."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import tiny
import torch

from headwater.backends.hf import HfEngine
from headwater.core.errors import RolloutFailed, WeightsError
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.observe.spans import Spans

PROMPTS = ["1+2=", "12+34=", "What is 5 + 6?", "9"]


@pytest.fixture
def engine():
    engine = HfEngine(tiny.model(), tiny.tokenizer(), max_batch_sequences=64, spans=Spans())
    yield engine
    engine.close()


def request(text: str, key: int = 0, **sampling) -> ModelRequest:
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})
    return ModelRequest(f"{text}/{key}", tiny.prompt(text).tokens, params, key)


def generate(engine, requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.agenerate(each) for each in requests))

    return asyncio.run(all_of_them())


def test_greedy_equals_transformers_generate(engine):
    responses = generate(engine, [request(text, temperature=0.0) for text in PROMPTS])
    model = tiny.model()
    for text, response in zip(PROMPTS, responses, strict=True):
        tokens = torch.tensor([tiny.prompt(text).tokens])
        expected = model.generate(tokens, do_sample=False, max_new_tokens=12)[0, tokens.shape[1] :]
        assert list(response.output_tokens) == expected.tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_match_a_full_forward_pass(engine, temperature):
    model = tiny.model()
    for response in generate(engine, [request(text, key, temperature=temperature) for key, text in enumerate(PROMPTS)]):
        tokens = torch.tensor([response.input_tokens + response.output_tokens])
        with torch.no_grad():
            logprobs = (model(tokens).logits[0, :-1] / temperature).log_softmax(-1)
        start = len(response.input_tokens) - 1
        expected = logprobs[start:].gather(-1, tokens[0, start + 1 :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, atol=1e-4, rtol=1e-4)


def test_the_models_own_generation_settings_change_nothing(engine):
    model = tiny.model()
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.suppress_tokens = [40, 41]
    other = HfEngine(model, tiny.tokenizer(), max_batch_sequences=64, spans=Spans())
    requests = [request(text, key) for key, text in enumerate(PROMPTS)]
    assert [each.output_logprobs for each in generate(other, requests)] == [
        each.output_logprobs for each in generate(engine, requests)
    ]
    other.close()


def test_a_wait_that_ends_fails_the_requests_that_waited(engine, monkeypatch):
    monkeypatch.setattr("headwater.backends.hf._PAUSE_LIMIT_S", 0.1)
    engine.pause()
    with pytest.raises(RolloutFailed, match="1 requests wait for the hf engine to resume"):
        generate(engine, [request("1+2=")])
    engine.resume()
    assert generate(engine, [request("1+2=")])


def test_a_sample_does_not_depend_on_its_batch(engine):
    requests = [request(text, key) for text in PROMPTS for key in range(6)]
    together = generate(engine, requests)
    alone = [generate(engine, [each])[0] for each in requests]
    assert [each.output_tokens for each in together] == [each.output_tokens for each in alone]
    assert len({each.output_tokens for each in together}) > len(PROMPTS)


def test_a_response_ends_at_the_end_token_or_the_limit(engine):
    end = tiny.tokenizer().eos_token_id
    responses = generate(engine, [request("1+2=", key, max_new_tokens=200) for key in range(24)])
    stopped = [each for each in responses if each.stop_reason == "stop"]
    assert stopped
    for each in stopped:
        assert each.output_tokens[-1] == end
        assert end not in each.output_tokens[:-1]
    for each in generate(engine, [request("1+2=", 1, max_new_tokens=2, min_new_tokens=2)]):
        assert each.stop_reason == "length"
        assert len(each.output_tokens) == 2


def test_batches_are_bounded_and_mixed_settings_are_served():
    engine = HfEngine(tiny.model(), tiny.tokenizer(), max_batch_sequences=3, spans=Spans())
    sizes, serve = [], engine._generate
    engine._generate = lambda batch: sizes.append(len(batch)) or serve(batch)
    requests = [request("1+2=", key, max_new_tokens=2 + key % 2) for key in range(10)]
    responses = generate(engine, requests)
    engine.close()
    assert sorted(sizes) == [2, 2, 3, 3]
    assert [len(each.output_tokens) <= 2 + key % 2 for key, each in enumerate(responses)] == [True] * 10


def test_new_weights_change_responses_and_tag_them(engine):
    before = generate(engine, [request("1+2=", temperature=0.0)])[0]
    other = tiny.model(seed=1)
    engine.update_weights(WeightUpdate.of(7, other.named_parameters())).result(120)
    after = generate(engine, [request("1+2=", temperature=0.0)])[0]
    assert set(before.output_versions) == {0}
    assert set(after.output_versions) == {7}
    assert after.output_tokens != before.output_tokens


@pytest.mark.parametrize("spoil", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused_whole(engine, spoil):
    before = generate(engine, [request("1+2=", temperature=0.0)])[0]
    update = {name: tensor.detach() + 1 for name, tensor in tiny.model().named_parameters()}
    name = "model.layers.1.mlp.up_proj.weight"
    if spoil == "missing":
        del update[name]
    elif spoil == "unknown":
        update["model.extra"] = torch.zeros(1)
    else:
        update[name] = update[name][:-1]
    with pytest.raises(WeightsError, match="the old weights stay in place"):
        engine.update_weights(WeightUpdate.of(1, update.items())).result(120)
    assert generate(engine, [request("1+2=", temperature=0.0)])[0].output_logprobs == before.output_logprobs
    assert engine.get_version() == 0


def test_requests_wait_while_paused(engine):
    async def scenario():
        engine.pause()
        waiting = asyncio.ensure_future(engine.agenerate(request("1+2=")))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        engine.resume()
        return await asyncio.wait_for(waiting, 120)

    assert asyncio.run(scenario()).output_tokens


def test_bad_requests_name_what_is_wrong(engine):
    params = SamplingParams(max_new_tokens=4)
    with pytest.raises(RolloutFailed, match="token id 99999 is outside the vocabulary of 512"):
        generate(engine, [ModelRequest("r", (99999,), params, 0)])
    with pytest.raises(RolloutFailed, match=r"3 prompt tokens \+ 5000 new tokens exceed the model's 2048 positions"):
        generate(engine, [ModelRequest("r", (7, 8, 9), SamplingParams(max_new_tokens=5000), 0)])


def test_generation_that_nobody_waits_for_ends_early(engine):
    passes, is_running, go_on = [], threading.Event(), threading.Event()

    def count(*_):
        passes.append(1)
        if len(passes) == 5:
            is_running.set()
            assert go_on.wait(120)

    async def scenario():
        long = asyncio.ensure_future(engine.agenerate(request("1+2=", max_new_tokens=2000, min_new_tokens=2000)))
        assert await asyncio.to_thread(is_running.wait, 120)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        go_on.set()
        await engine.agenerate(request("1+2=", max_new_tokens=1))

    hook = engine._model.register_forward_pre_hook(count)
    try:
        asyncio.run(scenario())
    finally:
        hook.remove()
    assert len(passes) < 20


def test_a_cancelled_caller_does_not_disturb_the_next(engine):
    async def scenario():
        cancelled = asyncio.ensure_future(engine.agenerate(request("1+2=", 1)))
        await asyncio.sleep(0)
        cancelled.cancel()
        return await engine.agenerate(request("1+2=", 2))

    assert asyncio.run(scenario()).output_tokens == generate(engine, [request("1+2=", 2)])[0].output_tokens


def test_a_response_goes_on_from_its_beginning(engine):
    asked = [request(text, key, max_new_tokens=20) for key, text in enumerate(PROMPTS)]
    whole = generate(engine, asked)
    for count in (0, 1, 7):
        given = [
            replace(each, given_tokens=response.output_tokens[:count])
            for each, response in zip(asked, whole, strict=True)
        ]
        for response, wanted in zip(generate(engine, given), whole, strict=True):
            assert response.output_tokens == wanted.output_tokens[count:]
            assert response.output_logprobs == pytest.approx(wanted.output_logprobs[count:], abs=1e-4)
            assert response.stop_reason == wanted.stop_reason


def test_given_tokens_may_be_a_whole_response(engine):
    asked = request("1+2=", 1, max_new_tokens=4, stop_strings=("ab",), ignore_end=True)
    letters = tiny.tokenizer().encode("xa", add_special_tokens=False), tiny.tokenizer().encode("b")
    given = [replace(asked, given_tokens=tokens) for tokens in [(40,) * 4, (*letters[0], *letters[1])]]
    responses = generate(engine, given)
    assert [(each.output_tokens, each.stop_reason) for each in responses] == [((), "length"), ((), "stop")]


def test_a_stop_string_ends_a_response_wherever_it_was_split(engine):
    free = generate(engine, [request("1+2=", 3, max_new_tokens=40, ignore_end=True)])[0]
    text = tiny.tokenizer().decode(list(free.output_tokens))
    stop = next(text[at : at + 2] for at in range(10, len(text)) if "\ufffd" not in text[at : at + 2])
    asked = request("1+2=", 3, max_new_tokens=40, ignore_end=True, stop_strings=(stop,))
    whole = generate(engine, [asked])[0]
    assert whole.stop_reason == "stop"
    assert stop in tiny.tokenizer().decode(list(whole.output_tokens))
    assert whole.output_tokens == free.output_tokens[: len(whole.output_tokens)]
    for count in range(1, len(whole.output_tokens) + 1):
        given = replace(asked, given_tokens=whole.output_tokens[:count])
        assert generate(engine, [given])[0].output_tokens == whole.output_tokens[count:]
