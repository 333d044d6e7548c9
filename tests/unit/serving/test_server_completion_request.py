"""Bodies of /v1/completions."""

from __future__ import annotations

from serving.parts import NAME, OPTIONS, assert_refused, limits, refusal
from tiny import tokenizer

from headwater.core.requests import Grammar, SamplingParams
from headwater.serving.openai.completions import read_completion


def read(body, **bounds):
    return read_completion(body, limits(**bounds), OPTIONS)


def test_defaults_are_those_of_openai():
    plan = read({"prompt": "hi"})
    (request,) = plan.requests
    assert request.input_tokens == tuple(tokenizer().encode("hi"))
    assert request.sampling == SamplingParams(max_new_tokens=16)
    assert plan.model == NAME
    shape = plan.shape
    assert (shape.stream, shape.logprobs, shape.token_ids, shape.include_usage) == (False, False, False, False)


def test_every_setting_arrives():
    plan = read(
        {
            "model": NAME, "prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
            "min_p": 0.1, "min_tokens": 2, "ignore_eos": True, "stop": ["a", "b"], "stop_token_ids": [3], "n": 2,
            "seed": 7, "logprobs": 1, "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True, "user": "someone", "frequency_penalty": 0, "logit_bias": {}, "best_of": 2,
            "skip_special_tokens": False, "include_stop_str_in_output": True,
        }
    )  # fmt: skip
    assert [request.input_tokens for request in plan.requests] == [(7, 8, 9)] * 2
    assert plan.requests[0].sampling == SamplingParams(
        max_new_tokens=5, temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, min_new_tokens=2, stop_token_ids=(3,),
        stop_strings=("a", "b"), ignore_end=True, num_top_logprobs=1,
    )  # fmt: skip
    shape = plan.shape
    assert (shape.stream, shape.logprobs, shape.token_ids, shape.include_usage) == (True, True, True, True)
    assert shape.rules.stops == ("a", "b")
    assert (shape.rules.skip_special_tokens, shape.rules.keep_stop) == (False, True)


def test_the_cache_key_is_the_session():
    plan = read({"prompt": ["a", "b"], "n": 2, "prompt_cache_key": "chat 7"})
    assert [each.session for each in plan.requests] == ["chat 7"] * 4
    assert read({"prompt": "a"}).requests[0].session == ""


def test_prompts_come_in_four_forms():
    for prompt, num_prompts in [("hi", 1), (["hi", "ho"], 2), ([1, 2], 1), ([[1, 2], [3]], 2), (["hi", [1]], 2)]:
        plan = read({"prompt": prompt, "n": 3})
        assert len(plan.requests) == 3 * num_prompts, prompt
        assert len({request.request_id for request in plan.requests}) == 3 * num_prompts, prompt
        assert plan.num_prompt_tokens == sum(len(request.input_tokens) for request in plan.requests[::3]), prompt


def keys(body) -> list[int]:
    return [request.rng_key for request in read(body).requests]


def test_a_seed_decides_every_sample():
    assert keys({"prompt": "hi", "seed": 5, "n": 3}) == keys({"prompt": "hi", "seed": 5, "n": 3})
    assert len(set(keys({"prompt": "hi", "seed": 5, "n": 3}))) == 3
    assert keys({"prompt": "hi", "seed": 5, "n": 3}) != keys({"prompt": "hi", "seed": 6, "n": 3})
    assert all(-(2**63) <= key < 2**63 for key in keys({"prompt": "hi", "seed": 2**70, "n": 8}))


def test_a_samples_randomness_does_not_depend_on_its_company():
    many = keys({"prompt": ["hi", "ho"], "seed": 5, "n": 3})
    assert keys({"prompt": "ho", "seed": 5, "n": 1})[0] == many[3]


def test_without_a_seed_randomness_is_new():
    assert keys({"prompt": "hi"}) != keys({"prompt": "hi"})


REFUSED = [
    ({}, "prompt: is missing"),
    ({"prompt": ""}, "prompt: is empty"),
    ({"prompt": []}, "prompt: is an empty list"),
    ({"prompt": [[]]}, "prompt[0]: is empty"),
    ({"prompt": 5}, "prompt = 5: must be a text, token ids"),
    ({"prompt": ["hi", {}]}, "prompt[1] = {}: must be a list of token ids"),
    ({"prompt": [1, "hi"]}, 'prompt[1] = "hi": must be a whole number'),
    ({"prompt": [1, 512]}, "prompt[1] = 512: no such token; ids are 0 to 511"),
    ({"prompt": [-1]}, "prompt[0] = -1: no such token"),
    ({"prompt": "a\ud800"}, "surrogate"),
    ({"prompt": "hi", "max_tokens": 0}, "max_tokens = 0: must be >= 1"),
    ({"prompt": [5] * 60, "max_tokens": 5}, "max_tokens = 5: the prompt has 60 tokens and the model supports 64"),
    ({"prompt": [5] * 64}, "the prompt has 64 tokens, and the model supports 64 including the response"),
    ({"prompt": "hi", "temperature": -1}, "temperature = -1: must be >= 0"),
    ({"prompt": "hi", "temperature": "hot"}, 'temperature = "hot": must be a number'),
    ({"prompt": "hi", "top_p": 0}, "top_p = 0: must be > 0"),
    ({"prompt": "hi", "top_p": 1.5}, "top_p = 1.5: must be <= 1"),
    ({"prompt": "hi", "top_k": -2}, "top_k = -2: must be >= -1"),
    ({"prompt": "hi", "min_p": 1}, "min_p = 1.0: must be < 1"),
    ({"prompt": "hi", "min_tokens": 17}, "min_tokens = 17: must be at most the requested tokens, 16"),
    ({"prompt": "hi", "n": 0}, "n = 0: must be >= 1"),
    ({"prompt": "hi", "n": 33}, "n: 33 responses are more than the queue can hold (32)"),
    ({"prompt": ["hi"] * 40}, "prompt: 40 responses are more"),
    ({"prompt": "hi", "seed": 0.5}, "seed = 0.5: must be a whole number"),
    ({"prompt": "hi", "stop": ["a", ""]}, "stop: contains an empty string"),
    ({"prompt": "hi", "stop": 5}, "stop[0] = 5: must be text"),
    ({"prompt": "hi", "stop_token_ids": [512]}, "stop_token_ids[0] = 512: no such token"),
    ({"prompt": "hi", "logprobs": 21}, "logprobs = 21: must be <= 20"),
    ({"prompt": "hi", "echo": "yes"}, 'echo = "yes": must be true or false'),
    ({"prompt": "hi", "suffix": "x"}, 'suffix = "x": not supported'),
    ({"prompt": "hi", "best_of": 4}, "best_of = 4: not supported"),
    ({"prompt": "hi", "frequency_penalty": 2.5}, "frequency_penalty = 2.5: must be <= 2"),
    ({"prompt": "hi", "presence_penalty": -3}, "presence_penalty = -3: must be >= -2"),
    ({"prompt": "hi", "repetition_penalty": 0}, "repetition_penalty = 0: must be > 0"),
    ({"prompt": "hi", "logit_bias": {"512": 1}}, "logit_bias: '512' is not a token; ids are \"0\" to \"511\""),
    ({"prompt": "hi", "logit_bias": {"x": 1}}, "logit_bias: 'x' is not a token"),
    ({"prompt": "hi", "logit_bias": {"5": 101}}, "logit_bias.5 = 101: must be a number in [-100, 100]"),
    ({"prompt": "hi", "response_format": {"type": "xml"}}, 'response_format.type = "xml": must be one of'),
    ({"prompt": "hi", "response_format": {"type": "json_schema"}}, "response_format.json_schema: is missing"),
    ({"prompt": "hi", "response_format": {"type": "json_object"}, "ignore_eos": True}, "grammar: needs the end token"),
    ({"prompt": "hi", "response_format": {"type": "json_object"}, "min_tokens": 2}, "grammar: decides when"),
    ({"prompt": "hi", "stream_options": {"include_usage": True}}, "stream_options: requires stream = true"),
    ({"prompt": "hi", "stream": True, "stream_options": {"usage": 1}}, "stream_options.usage: no such field"),
    ({"prompt": "hi", "max_token": 5}, "max_token: no such field; did you mean max_tokens?"),
]  # fmt: skip


def test_refusals_name_field_value_and_remedy():
    assert_refused(read, REFUSED)


def test_settings_that_change_the_distribution_arrive():
    (request,) = read(
        {
            "prompt": "hi", "logit_bias": {"5": -100, "7": 2.5}, "presence_penalty": 1, "frequency_penalty": -0.5,
            "repetition_penalty": 1.2, "response_format": {"type": "json_object"},
        }
    ).requests  # fmt: skip
    sampling = request.sampling
    assert sampling.logit_bias == ((5, -100.0), (7, 2.5))
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -0.5, 1.2)
    assert sampling.grammar == Grammar("json_schema", '{"type":"object"}')
    assert sampling.features == ("logit_bias", "penalties", "grammar")


def test_a_prompt_is_scored_only_if_its_logprobs_are_shown():
    for body, max_new_tokens, scores, num_top in [
        ({"echo": True, "max_tokens": 0, "logprobs": 3}, 0, True, 3),
        ({"echo": True, "max_tokens": 1, "logprobs": 0}, 1, True, 0),
        ({"echo": True, "max_tokens": 0}, 0, True, 0),
        ({"echo": True}, 16, False, 0),
        ({"logprobs": 2}, 16, False, 2),
    ]:
        sampling = read({"prompt": "hi", **body}).requests[0].sampling
        found = sampling.max_new_tokens, sampling.prompt_logprobs, sampling.num_top_logprobs
        assert found == (max_new_tokens, scores, num_top), body
    assert read({"prompt": [5] * 64, "echo": True, "max_tokens": 0}).requests[0].sampling.max_new_tokens == 0


def test_the_default_length_shrinks_to_the_room_there_is():
    assert read({"prompt": [5] * 60}).requests[0].sampling.max_new_tokens == 4


def test_another_models_name_is_not_found():
    error = refusal(read, {"prompt": "hi", "model": "gpt-17"})
    assert (error.status, error.code) == (404, "model_not_found")
    assert NAME in str(error)
