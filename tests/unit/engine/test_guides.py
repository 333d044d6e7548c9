"""Biases, penalties, grammars, alternatives and the log-probs of prompts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import case
from engine.engine_parts import (
    VOCABULARY,
    bits,
    collect,
    like_a_gpu,
    logits_after,
    make_model,
    reference,
    request,
    run,
    running,
    stepped,
    texts,
    tokens_of,
)
from tiny import tokenizer

from headwater.backends.hf import HfEngine
from headwater.core.errors import RequestError
from headwater.core.requests import Grammar, ModelResponse, SamplingParams
from headwater.observe.spans import Spans

PROMPT = tokens_of(9)
BIAS = ((42, 3.0), (77, -100.0))
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def engine():
    with running() as engine:
        yield like_a_gpu(engine)


def adjusted(logits: torch.Tensor, prompt: tuple[int, ...], before: tuple[int, ...], params: SamplingParams):
    """The logits after all changes, computed token by token from the definitions."""
    logits = logits.clone()
    for token in {*prompt, *before}:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(before).items():
        logits[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias
    return logits


def expected_logprobs(response: ModelResponse, params: SamplingParams) -> torch.Tensor:
    """Log-probs of all tokens at every place of the response."""
    everything = response.input_tokens + response.output_tokens
    logits = logits_after(reference(), everything[:-1])[len(response.input_tokens) - 1 :]
    rows = [
        adjusted(row, response.input_tokens, response.output_tokens[:place], params) for place, row in enumerate(logits)
    ]
    return (torch.stack(rows) / (params.temperature or 1.0)).log_softmax(-1)


def test_biases_and_penalties_change_the_distribution_as_defined(engine):
    for settings in ({"logit_bias": BIAS}, PENALTIES, {"logit_bias": BIAS, **PENALTIES, "temperature": 0.7}):
        with case(settings):
            greedy, drawn = engine.generate(
                [
                    request(PROMPT, 1, max_new_tokens=20, **{**settings, "temperature": 0.0}),
                    request(PROMPT, 2, max_new_tokens=20, **settings),
                ]
            )
            params = SamplingParams(20, **settings)
            for response, own in ((greedy, replace(params, temperature=0.0)), (drawn, params)):
                logprobs = expected_logprobs(response, own)
                wanted = logprobs.gather(1, torch.tensor(response.output_tokens)[:, None])[:, 0]
                assert response.output_logprobs == pytest.approx(wanted.tolist(), abs=1e-4)
            assert list(greedy.output_tokens) == expected_logprobs(greedy, params).argmax(-1).tolist()


def test_alternatives_are_the_most_likely_tokens_of_the_distribution(engine):
    params = SamplingParams(10, num_top_logprobs=4, temperature=0.7, logit_bias=BIAS)
    asked = request(PROMPT, 3, max_new_tokens=10, num_top_logprobs=4, temperature=0.7, logit_bias=BIAS)
    (response,) = engine.generate([asked])
    wanted = expected_logprobs(response, params).topk(4)
    found = response.output_top_logprobs
    assert [[token for token, _ in each] for each in found] == wanted.indices.tolist()
    for each, values in zip(found, wanted.values.tolist(), strict=True):
        assert [logprob for _, logprob in each] == pytest.approx(values, abs=1e-4)
    # A truncated distribution has fewer alternatives, and a stream has them beside its tokens.
    (short,) = engine.generate([request(PROMPT, 3, max_new_tokens=4, num_top_logprobs=4, top_k=2)])
    assert [len(each) for each in short.output_top_logprobs] == [2] * 4
    deltas = run(collect(engine.astream(asked)))
    assert all(len(delta.tokens) == len(delta.top_logprobs) for delta in deltas)
    assert sum(len(delta.tokens) for delta in deltas) == 10


def test_a_response_cut_at_a_stop_has_as_many_alternatives_as_tokens(engine):
    (whole,) = engine.generate([request(PROMPT, 5, num_top_logprobs=1)])
    stop = whole.output_tokens[4]
    (cut,) = engine.generate([request(PROMPT, 5, num_top_logprobs=1, stop_token_ids=(stop,))])
    assert len(cut.output_top_logprobs) == len(cut.output_tokens) == whole.output_tokens.index(stop) + 1


def test_prompts_are_scored_as_the_model_scores_them():
    for settings in ({}, {"deterministic": True}, {"max_prefill_tokens": 8}, {"prefix_cache": False}):
        with case(settings), running(page_tokens=4, **settings) as engine:
            prompts = [tokens_of(length) for length in (1, 2, 9, 30)]
            scored = engine.generate(
                [request(each, max_new_tokens=0, prompt_logprobs=True, num_top_logprobs=2) for each in prompts]
            )
            for prompt, response in zip(prompts, scored, strict=True):
                assert (response.output_tokens, response.stop_reason) == ((), "length")
                scores, logprobs = response.prompt_scores, logits_after(reference(), prompt)[:-1].log_softmax(-1)
                wanted = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist() if prompt[1:] else []
                assert scores.logprobs == pytest.approx(wanted, abs=1e-4)
                assert [token for each in scores.top_logprobs for token, _ in each[:1]] == logprobs.argmax(-1).tolist()
            assert engine.metrics().kv_pages_used == 0
            # The response is the same with and without scores.
            plain, both = engine.generate([request(PROMPT, 7), request(PROMPT, 7, prompt_logprobs=True)])
            assert texts([plain]) == texts([both])
            assert len(both.prompt_scores.logprobs) == len(PROMPT) - 1
            if settings.get("deterministic"):
                assert bits([plain]) == bits([both])


def test_a_prompt_waits_for_pages_and_can_be_aborted():
    with stepped(num_pages=20) as engine:
        running_long = engine.submit(request(tokens_of(20), 1, max_new_tokens=30))
        engine.turn(2)
        waiting = engine.submit(request(tokens_of(60), 2, "late", max_new_tokens=0, prompt_logprobs=True))
        engine.turn(2)
        assert engine.engine.metrics().num_waiting == 1
        assert engine.call(lambda: engine.engine.abort("late")) == 1
        again = engine.submit(request(tokens_of(60), 2, max_new_tokens=0, prompt_logprobs=True))
        engine.finish()
        assert waiting.result(0).stop_reason == "abort"
        assert len(running_long.result(0).output_tokens) == 30
        assert len(again.result(0).prompt_scores.logprobs) == 59


def test_neighbours_keep_their_bits_in_deterministic_mode():
    with running(deterministic=True) as engine:
        others = [request(PROMPT, key, max_new_tokens=5, top_p=0.9 if key % 2 else 1.0) for key in range(4)]
        alone = bits(engine.generate(others))
        company = [
            request(tokens_of(5), 9, max_new_tokens=4, logit_bias=BIAS, num_top_logprobs=3),
            request(tokens_of(6), 9, grammar=JSON, ignore_end=False, max_new_tokens=8),
            request(tokens_of(7), 9, max_new_tokens=4, **PENALTIES, top_k=20),
        ]
        mixed = engine.generate(others + company)
        assert bits(mixed[:4]) == alone
        assert bits(mixed[4:]) == [each for one in company for each in bits(engine.generate([one]))]


def text_of(response: ModelResponse) -> str:
    return tokenizer().decode(response.output_tokens, skip_special_tokens=True)


def test_grammars_decide_what_is_sampled(engine):
    schemas = [request(PROMPT, key, grammar=JSON, ignore_end=False, max_new_tokens=200) for key in range(4)]
    regexes = [
        request(PROMPT, key, grammar=Grammar("regex", "[0-9]{3}-[ab]{2,4}"), ignore_end=False, max_new_tokens=20)
        for key in range(4)
    ]
    responses = engine.generate(schemas + regexes)
    assert {response.stop_reason for response in responses} == {"stop"}
    for response in responses[:4]:
        value = json.loads(text_of(response))
        assert set(value) == {"age", "kind"}
        assert 0 <= value["age"] <= 99
        assert value["kind"] in ("cat", "dog")
    for response in responses[4:]:
        digits, letters = text_of(response).split("-")
        assert len(digits) == 3
        assert set(letters) <= {"a", "b"}
    # The log-probs are those among the allowed tokens, so a token without alternatives has probability 1.
    assert responses[0].output_logprobs[-1] <= 0
    (going_on,) = engine.generate([replace(schemas[0], given_tokens=responses[0].output_tokens[:5])])
    assert going_on.output_tokens == responses[0].output_tokens[5:]


def test_wrong_settings_are_refused(engine):
    for settings, part in [
        ({"grammar": Grammar("json_schema", '{"type": "what"}'), "ignore_end": False}, "Invalid type: what"),
        ({"grammar": Grammar("json_schema", "["), "ignore_end": False}, "grammar"),
        ({"grammar": Grammar("regex", "("), "ignore_end": False}, "the regex is not supported"),
        ({"logit_bias": ((VOCABULARY, 1.0),)}, "outside the vocabulary"),
    ]:
        with case(settings), pytest.raises(RequestError, match=part):
            engine.generate([request(PROMPT, **settings)])
    for settings, part in [
        ({"max_new_tokens": 0}, "must be >= 1, or 0 with prompt_logprobs"),
        ({"presence_penalty": 3.0}, "presence_penalty = 3.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"num_top_logprobs": 21}, "num_top_logprobs = 21"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias of token 5"),
        ({"grammar": JSON, "min_new_tokens": 2, "ignore_end": False}, "remove min_new_tokens"),
    ]:
        with case(settings), pytest.raises(ValueError, match=part):
            request(PROMPT, **settings)


def test_the_transformers_backend_samples_the_same_and_refuses_prompt_scores(engine):
    other = HfEngine(make_model(), tokenizer(), max_batch_sequences=8, spans=Spans())
    try:
        for settings in (
            {"logit_bias": BIAS, **PENALTIES},
            {"num_top_logprobs": 3},
            {"grammar": JSON, "ignore_end": False, "max_new_tokens": 60},
        ):
            with case(settings):
                asked = request(PROMPT, 4, **settings)
                (wanted,), found = engine.generate([asked]), run(other.agenerate(asked))
                assert found.output_tokens == wanted.output_tokens
                assert found.output_logprobs == pytest.approx(wanted.output_logprobs, abs=1e-4)
                tops = [[token for token, _ in each] for each in found.output_top_logprobs]
                assert tops == [[token for token, _ in each] for each in wanted.output_top_logprobs]
        with pytest.raises(RequestError, match="does not support prompt_logprobs"):
            run(other.agenerate(request(PROMPT, 4, prompt_logprobs=True)))
    finally:
        other.close()
