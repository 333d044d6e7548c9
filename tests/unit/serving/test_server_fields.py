"""Reading JSON objects field by field."""

from __future__ import annotations

import json
import math

import pytest
from serving.parts import refusal

from headwater.core.errors import (
    LogitsBroken,
    MemoryRefused,
    ModelError,
    QueueFull,
    RequestError,
    RolloutFailed,
    WaitTimeout,
    WeightsError,
)
from headwater.serving.errors import api_error, shown
from headwater.serving.fields import Fields, read_object, write_json


def test_an_unknown_field_names_the_nearest():
    fields = Fields({"tempurature": 1}, "sampling_params")
    fields.number("temperature", 1.0)
    error = refusal(fields.done)
    assert str(error) == "sampling_params.tempurature: no such field; did you mean temperature?"
    assert error.param == "sampling_params.tempurature"


def test_an_unknown_field_unlike_all_lists_the_known():
    fields = Fields({"zzz": 1})
    fields.flag("stream", False)
    fields.integer("n", 1)
    assert str(refusal(fields.done)).endswith("known fields: n, stream")


def test_null_is_absent():
    fields = Fields({"n": None, "temperature": None, "stream": None, "stop": None, "x": None})
    assert fields.integer("n", 3) == 3
    assert fields.number("temperature", 0.5) == 0.5
    assert fields.flag("stream", True) is True
    assert fields.texts("stop") == ()
    fields.neutral("x", [], "never")
    fields.done()


WRONG_TYPES = [
    (lambda f: f.integer("v", 0), "v = true: must be a whole number"),
    (lambda f: f.number("v", 0), "v = true: must be a number"),
    (lambda f: f.text("v"), "v = true: must be text"),
    (lambda f: f.texts("v"), "v[0] = true: must be text"),
    (lambda f: f.integers("v"), "v = true: must be a list of whole numbers"),
    (lambda f: f.mapping("v"), "v = true: must be an object"),
    (lambda f: f.choice("v", ["a", "b"]), "v = true: must be one of a, b"),
    (lambda f: f.neutral("v", [False, 1], "no reason"), "v = true: not supported: no reason"),
]


def test_a_wrong_type_says_what_it_must_be():
    for call, message in WRONG_TYPES:
        assert str(refusal(call, Fields({"v": True}))) == message


def test_bounds():
    assert str(refusal(lambda: Fields({"v": 0}).integer("v", 1, minimum=1))) == "v = 0: must be >= 1"
    assert str(refusal(lambda: Fields({"v": 3}).integer("v", 1, maximum=2))) == "v = 3: must be <= 2"
    assert str(refusal(lambda: Fields({"v": 1.5}).number("v", 1, maximum=1))) == "v = 1.5: must be <= 1"
    positive = refusal(lambda: Fields({"v": 0}).number("v", 1, minimum=0, open_minimum=True))
    assert str(positive) == "v = 0: must be > 0"
    assert "too large" in str(refusal(lambda: Fields({"v": 10**400}).number("v", 1)))


def test_a_number_is_finite():
    for value in (math.inf, -math.inf, math.nan):
        error = refusal(Fields({"v": value}).number, "v", 1)
        assert str(error) == f"v = {json.dumps(value)}: must be a finite number"
        refusal(lambda fields: fields.number("v", 1, minimum=0, maximum=1), Fields({"v": value}))


def test_neutral_values_compare_as_numbers_do():
    Fields({"v": 0.0}).neutral("v", [0], "no")
    Fields({"v": 0}).neutral("v", [0.0], "no")
    Fields({"v": {"type": "text"}}).neutral("v", [{"type": "text"}], "no")
    refusal(lambda: Fields({"v": False}).neutral("v", [0], "no"))


def test_half_a_surrogate_pair_is_no_text():
    assert "surrogate" in str(refusal(lambda: Fields({"v": "a\ud800"}).text("v")))


BAD_BODIES = [
    (b'{"a": 1', "not valid JSON"),
    (b"[1]", "a JSON list; send an object"),
    (b"null", "a JSON null"),
    (b'{"a": NaN}', "a = NaN: is not a JSON number; send a finite number, or omit the field"),
    (b'{"a": {"b": [1, -Infinity, NaN]}}', "a.b[1] = -Infinity: is not a JSON number"),
    (b'{"a": NaN, "a": 1}', "the body = NaN"),
    (b"NaN", "NaN: is not a JSON number"),
    (b'{"a": "\xff"}', "not UTF-8"),
    (b"[" * 100_000, "nested too deeply"),
]


def test_bad_bodies():
    for body, part in BAD_BODIES:
        error = refusal(read_object, body)
        assert part in str(error), body[:40]
        assert (error.status, error.code) == (400, "bad_json"), body[:40]


def test_an_empty_body_is_an_empty_object():
    assert read_object(b" \n") == {}


def test_a_reply_without_json_numbers_is_an_error():
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"logprob": float("nan")})


STATUS_CODES = [
    (QueueFull("full"), 429, "queue_full"),
    (RequestError("bad"), 400, "bad_request"),
    (WeightsError("no"), 400, "weights_refused"),
    (ModelError("no"), 400, "weights_refused"),
    (WaitTimeout("late"), 504, "timeout"),
    (MemoryRefused("later"), 409, "memory_refused"),
    (LogitsBroken("nan"), 500, "logits_broken"),
    (RolloutFailed("gone"), 503, "engine_unavailable"),
]


def test_our_errors_have_status_codes():
    for error, status, code in STATUS_CODES:
        answer = api_error(error)
        assert (answer.status, answer.code) == (status, code)
        assert answer.body()["error"]["message"] == str(error)
        assert ("Retry-After" in answer.headers) == (status == 429)


def test_long_values_are_shown_short():
    assert shown(list(range(1000))) == "a list of 1000"
    assert len(shown("x" * 1000)) == 60
