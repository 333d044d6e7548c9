"""The SGLang API: bodies and replies."""

from __future__ import annotations

from serving.parts import assert_refused, limits, refusal
from tiny import tokenizer

from headwater.core.requests import Grammar, ModelResponse, SamplingParams
from headwater.serving.output import whole
from headwater.serving.sglang.generate import GenerateReply, read_generate
from headwater.serving.sglang.steering import AbortCall, PauseCall, UpdateFromDisk
from headwater.serving.state import ActiveRequests


def read(body, **bounds):
    return read_generate(body, limits(**bounds))


def test_defaults_are_those_of_sglang():
    call = read({"text": "hi"}, max_model_tokens=1000)
    (sample,) = call.samples
    assert sample.request.sampling == SamplingParams(max_new_tokens=128)
    assert (call.is_list, call.stream, sample.logprobs) == (False, False, False)


def test_every_setting_arrives():
    sampling = {
        "max_new_tokens": 5, "temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "n": 2, "stop": "a",
        "stop_token_ids": [3], "min_new_tokens": 2, "ignore_eos": True, "sampling_seed": 7, "no_stop_trim": True,
        "skip_special_tokens": False, "frequency_penalty": 0.5, "spaces_between_special_tokens": False,
    }  # fmt: skip
    body = {
        "input_ids": [7, 8], "sampling_params": sampling, "return_logprob": True, "stream": True, "rid": "mine",
        "image_data": None, "logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": True,
    }  # fmt: skip
    call = read(body)
    first, second = call.samples
    assert first.request.input_tokens == (7, 8)
    assert first.request.sampling == SamplingParams(
        max_new_tokens=5, temperature=0.0, top_k=40, top_p=0.9, min_p=0.1, min_new_tokens=2, stop_token_ids=(3,),
        stop_strings=("a",), ignore_end=True, frequency_penalty=0.5,
    )  # fmt: skip
    assert (first.logprobs, first.token_texts, call.stream, call.is_list) == (True, True, True, True)
    assert (first.rules.keep_stop, first.rules.skip_special_tokens) == (True, False)
    assert (first.name, second.name) == ("mine_0", "mine_1")
    assert call.names == {"mine": (first.request.request_id, second.request.request_id)}
    assert [sample.request.rng_key for sample in read(body).samples] == [first.request.rng_key, second.request.rng_key]


def test_grammars_arrive():
    for given, grammar in [
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"json_schema": "{}"}, Grammar("json_schema", "{}")),
        ({"regex": "", "json_schema": None}, None),
    ]:
        assert read({"text": "hi", "sampling_params": given}).samples[0].request.sampling.grammar == grammar


def test_a_batch_may_differ_by_prompt():
    call = read(
        {
            "text": ["hi", "ho"],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}],
            "return_logprob": [True, False],
            "rid": ["a", "b"],
        }
    )
    assert [sample.name for sample in call.samples] == ["a", "b_0", "b_1"]
    assert [sample.request.sampling.max_new_tokens for sample in call.samples] == [1, 2, 2]
    assert [sample.logprobs for sample in call.samples] == [True, False, False]
    a, *b = (sample.request.request_id for sample in call.samples)
    assert call.names == {"a": (a,), "b": tuple(b)}


def test_one_rid_for_a_batch_begins_the_names_of_its_prompts():
    call = read({"input_ids": [[1], [2]], "rid": "r"})
    first, second = (sample.request.request_id for sample in call.samples)
    assert call.names == {"r_0": (first,), "r_1": (second,), "r": (first, second)}
    assert [sample.name for sample in call.samples] == ["r_0", "r_1"]
    assert call.is_list


def test_similar_names_stand_for_different_requests():
    """The samples of ``a`` are shown as ``a_0`` and ``a_1``. Aborting another client's ``a_0`` must not end them."""
    active = ActiveRequests()
    samples = read({"text": "hi", "rid": "a", "sampling_params": {"n": 2}})
    other = read({"text": ["hi", "ho"], "rid": ["a_0", "a_1"]})
    with active.hold(samples.names, "rid"), active.hold(other.names, "rid"):
        ids = [*active.find("a"), *active.find("a_0"), *active.find("a_1")]
    assert len(set(ids)) == len(ids) == 4
    within = read({"text": ["hi", "ho"], "rid": ["b_0", "b"], "sampling_params": [{}, {"n": 2}]})
    assert len({each.request_id for each in within.requests}) == 3


def test_a_refusal_of_the_engine_names_the_rid():
    assert read({"text": "hi", "rid": "mine"}).requests[0].request_id.startswith("mine-")


def test_three_values_of_top_k_keep_all_tokens():
    for top_k in (-1, 1 << 30, None):
        assert read({"text": "hi", "sampling_params": {"top_k": top_k}}).requests[0].sampling.top_k == 0, top_k


REFUSED = [
    ({}, "text, input_ids: neither is given"),
    ({"text": "hi", "input_ids": [1]}, "text, input_ids: both are given"),
    ({"text": []}, "text: is an empty list"),
    ({"text": ["hi", 5]}, "text[1] = 5: must be text"),
    ({"input_ids": 5}, "input_ids = 5: must be a list of token ids"),
    ({"input_ids": [[1], [600]]}, "input_ids[1][0] = 600: no such token"),
    ({"text": "hi", "sampling_params": 5}, "sampling_params = 5: must be an object"),
    ({"text": "hi", "sampling_params": [{}, {}]}, "sampling_params: a list of 2 for 1 prompts"),
    ({"text": "hi", "sampling_params": {"top_k": 0}}, "sampling_params.top_k = 0: must be >= 1, or -1"),
    ({"text": "hi", "sampling_params": {"max_tokens": 5}}, "did you mean max_new_tokens?"),
    ({"text": "hi", "sampling_params": {"max_new_tokens": 99}}, "sampling_params.max_new_tokens = 99: the prompt"),
    ({"text": "hi", "sampling_params": {"ebnf": "a"}}, "use json_schema or regex"),
    ({"text": "hi", "sampling_params": {"regex": "a", "json_schema": "{}"}}, "both are given"),
    ({"text": "hi", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}}, "at most max_new_tokens = 8"),
    ({"text": "hi", "return_logprob": 1}, "return_logprob = 1: must be true or false"),
    (
        {"text": "hi", "top_logprobs_num": 2},
        "top_logprobs_num = 2: not supported: only the log-probs",
    ),
    ({"text": "hi", "logprob_start_len": 0}, "logprob_start_len = 0: not supported"),
    ({"text": "hi", "image_data": ["x.png"]}, "image_data"),
    ({"text": "hi", "lora_path": "x"}, "without adapters"),
    ({"text": "hi", "rid": ""}, "rid: is empty"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid: contains a name twice"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid: a list of 1 for 2 prompts"),
    ({"text": "hi", "retrun_logprob": True}, "did you mean return_logprob?"),
    ({"text": "hi", "sampling_params": {"n": 33}}, "more than the queue can hold (32)"),
]


def test_refusals_name_field_value_and_remedy():
    assert_refused(read, REFUSED)


def reply(sampling, tokens, stop_reason, **options) -> dict:
    (sample,) = read({"text": "hi", "rid": "r", "sampling_params": sampling, **options}).samples
    response = ModelResponse((5,), tuple(tokens), (-1.0,) * len(tokens), (2,) * len(tokens), stop_reason)
    gathered = GenerateReply(sample, tokenizer())
    gathered.add(whole(response, tokenizer(), sample.rules))
    return gathered.body(version=9)


def test_a_reply():
    tokens = tokenizer().encode("abc")
    body = reply({"max_new_tokens": 3}, tokens, "length", return_logprob=True, return_text_in_logprobs=True)
    assert body == {
        "text": "abc",
        "output_ids": tokens,
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 2,
            "completion_tokens": len(tokens),
            "weight_version": "2",
            "weight_versions": [{"version": "2", "start": 0, "end": len(tokens)}],
            "output_versions": [2] * len(tokens),
            "output_token_logprobs": [(-1.0, token, tokenizer().decode([token])) for token in tokens],
        },
    }


def test_log_probs_only_where_asked_for():
    assert "output_token_logprobs" not in reply({}, [7], "length")["meta_info"]
    (entry,) = reply({}, [7], "length", return_logprob=True)["meta_info"]["output_token_logprobs"]
    assert entry == (-1.0, 7, None)


def test_reasons_for_the_end():
    tokens = tokenizer().encode("ab.")
    assert reply({"stop": "."}, tokens, "stop")["meta_info"]["finish_reason"] == {"type": "stop", "matched": "."}
    assert reply({"stop": "."}, tokens, "stop")["text"] == "ab"
    assert reply({"stop": ".", "no_stop_trim": True}, tokens, "stop")["text"] == "ab."
    assert reply({}, [*tokens, 1], "stop")["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    assert reply({}, [], "abort")["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply({}, [], "abort")["meta_info"]["weight_version"] == "9"


def test_steering_bodies():
    assert AbortCall.read({"rid": "a"}) == AbortCall("a")
    assert AbortCall.read({"rid": "", "abort_all": True}) == AbortCall(None)
    assert "rid: is missing" in str(refusal(AbortCall.read, {}))
    assert PauseCall.read({}).mode == "abort"
    assert PauseCall.read({"mode": "in_place"}).mode == "in_place"
    assert "must be one of abort, retract, in_place" in str(refusal(PauseCall.read, {"mode": "stop"}))


def test_weights_from_disk():
    given = {"model_path": "folder", "weight_version": "12", "flush_cache": False, "abort_all_requests": True}
    read = UpdateFromDisk.read({**given, "load_format": None, "is_async": False})
    assert read == UpdateFromDisk("folder", 12, "in_flight", abort_all=True, keep_pause=False)
    assert UpdateFromDisk.read({"model_path": "x", "flush_cache": True}).mode == "interrupt"
    assert UpdateFromDisk.read({"model_path": "x"}).version is None
    assert "model_path: is missing" in str(refusal(UpdateFromDisk.read, {}))
    for version in ("step-3", -1, 1.5, True, "²"):
        assert "weight_version" in str(refusal(UpdateFromDisk.read, {"model_path": "x", "weight_version": version}))
    assert "not supported" in str(refusal(UpdateFromDisk.read, {"model_path": "x", "load_format": "dummy"}))


def test_a_session_or_a_routing_key_keeps_requests_together():
    for body, session in (({}, ""), ({"session_id": "s"}, "s"), ({"session_id": "s", "routing_key": "k"}, "k")):
        call = read({"text": ["a", "b"], **body})
        assert [each.session for each in call.requests] == [session, session], body
