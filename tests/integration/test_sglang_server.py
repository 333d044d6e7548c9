"""A real SGLang server on the CPU: log-probs, interrupted responses, weights over a process group, training, a killed
server.

SGLang runs in an environment of its own (``make setup-sglang``). One server is started for all tests of this file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command import metrics, python_of, train_here
from listening import Process
from server_answers import (
    LIMIT_S,
    MODEL,
    TOLERANCE,
    ask,
    assert_continued,
    assert_sampled_by,
    logprobs,
    publish,
    still_answers,
    weights,
)

from headwater.backends import SERVER_KEY, BackendContext
from headwater.backends.sglang.engine import SglangEngine
from headwater.config.load import load_config
from headwater.core.errors import ConfigError, RequestError, RolloutFailed, WeightsError
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.models.device import with_dtype
from headwater.models.load import load_tokenizer
from headwater.observe.run_directory import RunDirectory
from headwater.observe.spans import Spans

PYTHON, IS_INSTALLED = python_of("sglang")
NO_SGLANG = f"NO REAL SGLANG: it is not installed for {PYTHON}; run `make setup-sglang`"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INSTALLED, reason=NO_SGLANG),
    pytest.mark.xdist_group("sglang"),
]


def context(*settings: str, model: str = MODEL) -> BackendContext:
    base = ["rollout.backend=sglang", "data.max_prompt_tokens=64", "rollout.max_new_tokens=256", f"model.path={model}"]
    config = with_dtype(load_config("quickstart", [*base, *settings]).config)
    return BackendContext(config, model, load_tokenizer(model), Spans())


@pytest.fixture(scope="module")
def engine() -> Iterator[SglangEngine]:
    # The cache would be as large as the machine's memory allows.
    launch = ["rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}", "engine.max_sequences=16"]
    launch += ["engine.update_mode=in_flight", "rollout.launch.args=[--max-total-tokens, '8192']"]
    engine = SglangEngine.launch(context(*launch), ["cpu"])
    yield engine
    engine.close()


def test_logprobs_are_those_of_the_published_weights(engine: SglangEngine) -> None:
    plain, greedy = SamplingParams(24, ignore_end=True), SamplingParams(24, temperature=0.0, ignore_end=True)
    for sampling in (plain, SamplingParams(24, temperature=0.7, ignore_end=True)):
        for response in asyncio.run(ask(engine, 4, sampling)):
            assert response.output_len == 24
            assert_sampled_by({engine.get_version(): weights(0)}, response, sampling)
    for version in (1, 2):
        publish(engine, weights(version), version)
        for sampling in (plain, greedy):
            for response in asyncio.run(ask(engine, 4, sampling)):
                assert_sampled_by({version: weights(version)}, response, sampling)


def test_responses_that_span_an_update_lose_no_token(engine: SglangEngine) -> None:
    for mode in ("interrupt", "in_flight", "drain"):
        # On a busy machine, all responses may end before the update, or all requests may arrive after it.
        assert any(updated_while_generating(engine, mode) for _ in range(20))


def updated_while_generating(engine: SglangEngine, mode: str) -> bool:
    """Whether a response has tokens of both versions, or for "drain" whether one was generated before the update."""
    sampling = SamplingParams(160, temperature=0.8, ignore_end=True)
    old = engine.get_version()
    publish(engine, weights(old), old)
    answers = generating(engine, 6, sampling)
    publish(engine, weights(old + 1), old + 1, mode)
    responses = answers()
    for response in responses:
        assert (response.output_len, response.stop_reason) == (160, "length")
        assert list(response.output_versions) == sorted(response.output_versions)
        num_old = response.output_versions.count(old)
        if mode != "in_flight" or num_old == 160:
            assert_sampled_by({old: weights(old), old + 1: weights(old + 1)}, response, sampling)
        elif num_old:
            # Its new tokens attend to keys and values of the old weights.
            assert_continued(weights(old), weights(old + 1), num_old, response, sampling)
        # Otherwise it waited in the server until after the update. The beginning of its prompt, which the requests
        # have in common, may come from the cache, with keys and values of the old weights.
    counts = {response.output_versions.count(old) for response in responses}
    if mode == "drain":
        assert counts <= {0, 160}
        return 160 in counts
    return bool(counts - {0, 160})


def generating(engine: SglangEngine, count: int, sampling: SamplingParams) -> Callable[[], list[ModelResponse]]:
    """Send requests, and wait until one that is streamed has a token. Return what waits for the others' responses."""
    has_started, responses = threading.Event(), []

    async def follow() -> None:
        request = ModelRequest("streamed", (5, 6, 7), sampling, rng_key=99)
        tokens: list[int] = []
        async for delta in engine.astream(request):
            tokens += delta.tokens
            has_started.set()
        assert len(tokens) == sampling.max_new_tokens

    async def run() -> None:
        *answered, _ = await asyncio.gather(ask(engine, count, sampling), follow())
        responses.extend(answered[0])

    def join() -> list[ModelResponse]:
        thread.join(LIMIT_S)
        assert len(responses) == count
        return responses

    def run_all() -> None:
        try:
            asyncio.run(run())
        finally:
            has_started.set()

    thread = threading.Thread(target=run_all)
    thread.start()
    assert has_started.wait(LIMIT_S)
    return join


def test_ends_aborts_and_pauses(engine: SglangEngine) -> None:
    tokenizer = load_tokenizer(MODEL)
    (free,) = asyncio.run(ask(engine, 1, SamplingParams(60, temperature=0.0, ignore_end=True)))
    stop = tokenizer.decode([free.output_tokens[20]]).strip() or tokenizer.decode([free.output_tokens[21]])
    (stopped,) = asyncio.run(ask(engine, 1, SamplingParams(60, 0.0, ignore_end=True, stop_strings=(stop,))))
    assert stopped.stop_reason == "stop"
    assert stop in tokenizer.decode(list(stopped.output_tokens))
    assert stop not in tokenizer.decode(list(stopped.output_tokens[:-1]))
    (plain,) = asyncio.run(ask(engine, 1, SamplingParams(60, 0.0)))  # the end token may be among them
    token = plain.output_tokens[len(plain.output_tokens) // 2]
    (ended,) = asyncio.run(ask(engine, 1, SamplingParams(60, 0.0, stop_token_ids=(token,))))
    assert ended.output_tokens == plain.output_tokens[: plain.output_tokens.index(token) + 1]
    with pytest.raises(RequestError, match="stop_token_ids"):
        asyncio.run(ask(engine, 1, SamplingParams(60, 0.0, stop_token_ids=(token,), ignore_end=True)))

    sampling = SamplingParams(250, ignore_end=True)
    for _ in range(20):  # on a busy machine, it may end before it is aborted, or be aborted before its first token
        answers = generating(engine, 1, sampling)
        num_aborted = engine.abort("request-0")
        (response,) = answers()
        assert num_aborted >= (response.stop_reason == "abort"), "it may also end by itself while it is aborted"
        if response.stop_reason == "abort" and response.output_len:
            break
    assert 0 < response.output_len < 250
    assert_sampled_by({engine.get_version(): weights(engine.get_version())}, response, sampling)

    engine.pause()
    thread = threading.Thread(target=lambda: asyncio.run(ask(engine, 1, SamplingParams(4))))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    engine.resume()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_paused_server_takes_an_update_that_interrupts(engine: SglangEngine) -> None:
    """SGLang ends requests only while it runs, so it would wait for those of a paused server forever."""
    sampling, old = SamplingParams(160, ignore_end=True), engine.get_version()
    publish(engine, weights(old), old)
    answers = generating(engine, 4, sampling)
    engine.pause()
    publish(engine, weights(old + 1), old + 1, "interrupt")
    engine.resume()
    for response in answers():
        assert response.output_len == 160
        assert_sampled_by({old: weights(old), old + 1: weights(old + 1)}, response, sampling)


def test_weights_arrive_over_a_process_group(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    settings = (f"rollout.servers=[{engine.url}]", "rollout.weight_transfer=collective")
    second = SglangEngine.connect(engine.url, context(*settings))
    sampling = SamplingParams(160, ignore_end=True)
    try:
        for version in (101, 102):
            publish(second, weights(version), version)
            for response in asyncio.run(ask(second, 4, SamplingParams(24, ignore_end=True))):
                assert_sampled_by({version: weights(version)}, response, SamplingParams(24))
        answers = generating(second, 4, sampling)
        publish(second, weights(103), 103, "interrupt")
        for response in answers():
            assert response.output_len == 160
            assert_sampled_by({102: weights(102), 103: weights(103)}, response, sampling)
    finally:
        second.close()


def test_wrong_weights_models_and_settings_are_refused(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    version = engine.get_version()
    publish(engine, weights(1), version + 1)
    narrow = [(name, each[:1]) for name, each in weights(2).named_parameters()]
    with pytest.raises(WeightsError, match="shape"):
        engine.update_weights(WeightUpdate.of(version + 2, narrow)).result(LIMIT_S)
    (response,) = asyncio.run(ask(engine, 1, SamplingParams(8, ignore_end=True)))
    assert_sampled_by({version + 1: weights(1)}, response, SamplingParams(8))
    servers = f"rollout.servers=[{engine.url}]"
    with pytest.raises(RolloutFailed, match=SERVER_KEY):
        SglangEngine.connect(engine.url, context(servers))
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    with pytest.raises(ConfigError, match="another model"):
        SglangEngine.connect(engine.url, context(servers, model="tiny:llama"))
    truncated = ("rollout.top_p=0.9", "algorithm.old_logprobs=recompute")
    with pytest.raises(ConfigError, match="before truncation"):
        SglangEngine.connect(engine.url, context(servers, *truncated))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(engine.url + "/server_info", timeout=LIMIT_S)
    assert refused.value.code == 401
    assert engine.capabilities.memory_tags == ()
    with pytest.raises(RolloutFailed, match="cannot release its memory"):
        engine.sleep()


def test_a_run_ahead_learns_through_a_running_server(
    engine: SglangEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates arrive while the server generates for the next step."""
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    settings = ["rollout.backend=sglang", f"rollout.servers=[{engine.url}]", f"run.root={tmp_path}", "run.name=learns"]
    settings += ["trainer.total_steps=25", "eval.before=false", "rollout.max_staleness=1"]
    train_here("quickstart", *settings)
    records = metrics(tmp_path / "learns", "train")
    rewards = [record["reward/mean"] for record in records]
    assert sum(rewards[:5]) / 5 < 0.4
    assert sum(rewards[-5:]) / 5 > 0.6, rewards
    fresh = [each["rollout_gap/logprob_abs_mean"] for each in records if not each.get("staleness/lag_1")]
    assert max(fresh) < TOLERANCE, "tokens of the newest version have the log-probs of the learner's weights"
    assert all(0 < each["time/weights_pause_s"] <= each["time/weights_s"] for each in records)
    counts = RunDirectory.open(tmp_path / "learns").read_ledger()[-1]["counts"]
    assert (counts["dropped"], counts["in_flight"], counts["buffered"]) == (0, 0, 0)
    assert counts["dispatched"] == counts["trained"]


def test_the_route_command_is_an_endpoint_over_a_server(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(engine, weights(4), engine.get_version() + 1)
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    router = Process("route", engine.url, "--backend", "sglang", "--port", 0)
    prompt, sampling = [5, 6, 7, 8], {"max_new_tokens": 16, "temperature": 0.8, "ignore_eos": True}
    try:
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        status, answer = router.call("/generate", body)
        assert status == 200, answer
        own = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
        theirs = logprobs(weights(4), prompt, answer["output_ids"], temperature=0.8)
        assert len(own) == 16
        assert float((theirs - torch.tensor(own)).abs().max()) < TOLERANCE
    finally:
        router.end()


def test_a_killed_server_is_replaced_and_loses_no_token(engine: SglangEngine) -> None:
    version = engine.get_version() + 1
    publish(engine, weights(3), version)
    sampling = SamplingParams(250, ignore_end=True)
    for _ in range(20):
        answers = generating(engine, 4, sampling)
        while engine._session.num_started < 4 and engine._session.num_open == 5:
            time.sleep(0.005)
        os.killpg(engine._server.pid, signal.SIGSTOP)
        if still_answers(engine) and any(arrived := tokens_of_open_requests(engine)):
            break  # on a busy machine, all may have ended before that is seen
        os.killpg(engine._server.pid, signal.SIGCONT)
        answers()
    os.killpg(engine._server.pid, signal.SIGKILL)
    responses = answers()
    assert engine.status().num_restarts == 1
    for response, kept in zip(responses, arrived, strict=True):
        assert response.output_len == 250
        assert response.output_tokens[: len(kept)] == kept, "tokens that had arrived were generated again"
        assert_sampled_by({version: weights(3)}, response, sampling)


def tokens_of_open_requests(engine: SglangEngine) -> list[tuple[int, ...]]:
    """What has arrived of each of the four responses; empty for those that are complete."""
    arrived = {each.request.request_id: tuple(each.tokens) for each in engine._session._open}
    return [arrived.get(f"request-{number}", ()) for number in range(4)]
