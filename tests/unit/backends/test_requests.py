"""Requests that a child works on: what arrives stays, and only what is left is asked for again."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.backends.native.client import error_of
from headwater.backends.native.places import engine_arguments
from headwater.backends.native.requests import FramedRequest, OpenRequests
from headwater.cli.serve import read_engine_config
from headwater.config.schema import EngineConfig
from headwater.core.errors import (
    LogitsBroken,
    MemoryRefused,
    QueueFull,
    RequestError,
    RolloutFailed,
    WaitTimeout,
    WeightsError,
    WeightsIncomplete,
)
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.core.new_tokens import NewTokens
from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingParams, StopReason
from headwater.observe.spans import Spans
from headwater.serving.errors import api_error

FAILED = {"error": {"message": "the engine failed", "type": "server_error", "code": "engine_unavailable"}}


class Link:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.known_media: set[str] = set()

    def post(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


class Scene:
    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.events: list[str] = []
        self.spans = Spans()
        self.requests = OpenRequests(
            self.spans,
            on_finish=lambda: self.events.append("finished"),
            on_failed_engine=lambda why: self.events.append(why),
        )

    def enter(self, number: int) -> FramedRequest:
        request = ModelRequest(f"r{number}", (5, 6), SamplingParams(max_new_tokens=9), 1, given_tokens=(30,))
        opened = FramedRequest(number, request, self.answers.append)
        self.requests.enter(opened)
        return opened

    def arrive(self, number: int, *tokens: int, stop_reason: StopReason | None = None) -> None:
        count = len(tokens)
        new = NewTokens.of_delta(number, Delta(tokens, (-0.5,) * count, (2,) * count))
        ended = [] if stop_reason is None else [(number, stop_reason)]
        self.requests.take(NewTokens.decode(NewTokens.join([new], ended).encode()))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_new_child_is_asked_for_what_is_left(scene):
    scene.enter(1)
    first, second = Link(), Link()
    scene.requests.continue_on(first)
    assert [each["request"]["given_tokens"] for each in first.sent] == [(30,)]
    scene.arrive(1, 7, 8)
    scene.requests.continue_on(second)
    assert [each["request"]["given_tokens"] for each in second.sent] == [(30, 7, 8)]
    scene.arrive(1, 9, stop_reason="stop")
    [answer] = scene.answers
    assert answer.output_tokens == (7, 8, 9)
    assert answer.output_versions == (2, 2, 2)
    assert (answer.stop_reason, scene.events, len(scene.requests)) == ("stop", ["finished"], 0)


def test_an_end_that_nobody_asked_for_is_none(scene):
    link = Link()
    scene.requests.continue_on(link)
    scene.enter(1)
    scene.arrive(1, 7, stop_reason="abort")
    assert link.sent[-1]["request"]["given_tokens"] == (30, 7)
    assert not scene.answers


def test_a_request_that_several_children_died_with_is_given_up(scene):
    scene.requests.continue_on(Link())
    scene.enter(1)
    scene.requests.link = None  # that child has died
    scene.enter(2)
    for _ in range(5):
        scene.requests.continue_on(Link())
    assert [str(each).partition(" of")[0] for each in scene.answers] == ["request r1: 5 processes"]
    scene.requests.continue_on(Link())
    assert str(scene.answers[1]).startswith("request r2: 5 processes"), "it was never sent to the first of them"


def test_a_failed_engine_is_told_and_its_requests_stay(scene):
    scene.enter(1)
    scene.requests.refuse(1, FAILED)
    assert (scene.events, len(scene.requests), scene.answers) == (["the engine failed"], 1, [])


def test_who_has_left_is_answered_no_more(scene):
    link = Link()
    scene.requests.continue_on(link)
    opened = scene.enter(1)
    scene.requests.leave(opened)
    scene.requests.leave(opened)
    assert link.sent[-1] == {"id": 1, "leave": True}
    scene.arrive(1, 7, stop_reason="stop")
    assert not scene.answers


def test_closing_answers_with_what_there_is(scene):
    scene.enter(1)
    scene.enter(2)
    scene.arrive(2, 7)
    scene.requests.abort_all()
    assert [(each.output_tokens, each.stop_reason) for each in scene.answers] == [((), "abort"), ((7,), "abort")]
    assert all(isinstance(each, ModelResponse) for each in scene.answers)
    assert "generate" in scene.spans.drain()
    assert "generate" not in scene.spans.drain()  # nothing is open that would go on counting


def test_errors_cross_the_connection_as_they_are():
    kinds = [QueueFull, RequestError, WeightsError, WeightsIncomplete, MemoryRefused, LogitsBroken, WaitTimeout]
    for kind in (*kinds, RolloutFailed):
        error = error_of(api_error(kind("why")).body())
        assert (type(error), str(error)) == (kind, "why")


def test_every_setting_of_the_engine_reaches_the_server():
    config = EngineConfig(max_queue=5, overlap=False, update_mode="drain", kv_cache_gib=0.25)
    assert read_engine_config(engine_arguments(config, shares_device=True)) == config
    part = EngineConfig(memory_fraction=0.3)
    assert read_engine_config(engine_arguments(part, shares_device=True)) == part
    shared, alone = (read_engine_config(engine_arguments(EngineConfig(), shares_device=each)) for each in (True, False))
    assert shared == EngineConfig(memory_fraction=0.4)
    assert alone == EngineConfig(), "a server that has a device to itself sizes its cache from all of it"


def test_images_are_sent_once_per_server_and_again_on_request() -> None:
    scene, first, second = Scene(), Link(), Link()
    content = MediaContent.of("image", [b"encoded"])
    media = (PlacedMedia(content, (MediaBlock(0, 2),)),)
    scene.requests.link = first
    for number in (1, 2):
        request = ModelRequest(f"r{number}", (5, 6), SamplingParams(9), 1, media=media)
        scene.requests.enter(FramedRequest(number, request, scene.answers.append))
    scene.requests.refuse(
        2, {"error": {"message": "unknown", "type": "invalid_request_error", "code": "unknown_media"}}
    )
    scene.requests.continue_on(second)  # another server, which has none of them
    has_bytes = [["frames" in message["request"]["media"][0] for message in link.sent] for link in (first, second)]
    assert has_bytes == [[True, False, True], [True, False]]
    assert {message["request"]["media"][0]["digest"] for message in second.sent} == {content.digest}
    assert not scene.answers
