"""SGLang's exchanges as its documentation and source define them, and its differences between versions."""

from __future__ import annotations

import json

import pytest

from headwater.backends.sglang.dialect import DIALECTS, dialect_of
from headwater.backends.sglang.http import read_answer, read_info, write_body
from headwater.backends.vllm.dialect import DIALECTS as VLLM_DIALECTS
from headwater.backends.vllm.wire import Garbage, write_request
from headwater.config.load import load_config
from headwater.core.errors import ConfigError, LogitsBroken, RequestError, RolloutFailed
from headwater.core.records import ModelRequest, SamplingParams

ANSWER = {
    "text": " Paris.",
    "output_ids": [12095, 13, 151645],
    "meta_info": {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": 5,
        "weight_version": "default",
        "completion_tokens": 3,
        "cached_tokens": 0,
        "e2e_latency": 0.05,
        "output_token_logprobs": [[-0.25, 12095, None], [-1.5, 13, None], [-0.125, 151645, None]],
    },
}
"""A reply of ``/generate`` with ``return_logprob``."""

SERVER = {
    "model_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "context_length": None,
    "dtype": "auto",
    "device": "cuda",
    "random_seed": 987654321,
    "max_running_requests": 256,
    "enable_memory_saver": True,
    "max_req_input_len": 32762,
    "internal_states": [{}],
    "version": "0.5.6.post2",
}
"""The parts of ``/get_server_info`` that matter here."""


def changed(**meta: object) -> str:
    return json.dumps({**ANSWER, "meta_info": {**ANSWER["meta_info"], **meta}})


def test_an_answer_is_read_with_its_tokens_and_how_it_ended():
    chunk = read_answer(json.dumps(ANSWER))
    assert (chunk.tokens, chunk.logprobs, chunk.stop_reason) == ((12095, 13, 151645), (-0.25, -1.5, -0.125), "stop")
    aborted = {"type": "abort", "message": "Abort in waiting queue", "status_code": None, "err_type": None}
    chunk = read_answer(changed(finish_reason=aborted, output_token_logprobs=[[-0.5, 7, None]]))
    assert (chunk.tokens, chunk.stop_reason) == ((7,), "abort")
    assert read_answer(changed(finish_reason={"type": "length", "length": 3})).stop_reason == "length"


def test_garbage_is_named():
    for text in ("<html>", "[]", "null", "{}", changed(finish_reason=None), changed(finish_reason={"type": "?"})):
        with pytest.raises(Garbage):
            read_answer(text)
    for logprob in (float("nan"), 3.0):
        with pytest.raises(LogitsBroken, match="not numbers"):
            read_answer(changed(output_token_logprobs=[[logprob, 7, None]]))
    with pytest.raises(RequestError, match="too long"):
        read_answer(json.dumps({"error": {"message": "The input is too long"}}))


def test_a_request_has_the_names_and_defaults_of_sglang():
    sampling = SamplingParams(max_new_tokens=9, temperature=0.7, min_new_tokens=4, stop_token_ids=(3,))
    request = ModelRequest("r1", (5, 6), sampling, rng_key=11, given_tokens=(8,))
    body = write_body(write_request(request, VLLM_DIALECTS[-1], (2,), 0), DIALECTS[0])
    assert (body["rid"], body["input_ids"], body["return_logprob"], body["stream"]) == ("r1", [5, 6, 8], True, False)
    params = body["sampling_params"]
    assert (params["max_new_tokens"], params["min_new_tokens"], params["temperature"]) == (8, 3, 0.7)
    assert (params["top_k"], params["top_p"], params["stop_token_ids"]) == (-1, 1.0, [2, 3])
    assert 0 <= params["sampling_seed"] < 2**31
    older = write_body(write_request(request, VLLM_DIALECTS[-1], (2,), 0), DIALECTS[-1])
    assert "sampling_seed" not in older["sampling_params"], "an unknown parameter is an error there"


def test_what_differs_between_versions_is_found_by_the_version():
    assert dialect_of("0.5.6.post2").has_pause_modes
    assert dialect_of("0.6.0rc1").has_pause_modes
    assert not dialect_of("0.5.5").has_pause_modes
    assert dialect_of("0.5.5").has_seeds
    assert not dialect_of("0.5.2").has_seeds
    with pytest.raises(RolloutFailed, match=r"SGLang 0\.4\.9 is not supported; install SGLang 0\.5\.0"):
        dialect_of("0.4.9")


def test_a_restarted_server_differs_from_the_one_before():
    model = {"model_path": SERVER["model_path"], "weight_version": "default"}
    info = read_info(SERVER, model)
    assert (info.max_model_tokens, info.max_sequences, info.can_sleep) == (32762, 256, True)
    assert read_info({**SERVER, "random_seed": 1}, model).instance != info.instance
    assert read_info(SERVER, {**model, "weight_version": "7"}).instance != info.instance
    with pytest.raises(LookupError):
        read_info({}, model)


def test_settings_that_sglang_cannot_have_are_refused_before_a_run_starts():
    near = ["rollout.backend=sglang", "rollout.servers=[http://127.0.0.1:30000]"]
    assert load_config(None, near).config.rollout.backend == "sglang"
    for setting in ("rollout.weight_transfer=shared_memory", "engine.page_tokens=16"):
        with pytest.raises(ConfigError, match=setting.partition("=")[0].replace(".", r"\.")):
            load_config(None, [*near, setting])
