"""The engine in a separate process: the same bits, weights that arrive, and a child that may die at any moment."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import is_gone

from headwater.backends import BACKENDS, BackendContext
from headwater.backends.launch import keeper
from headwater.backends.native.engine import NativeEngine
from headwater.backends.native.places import OwnServer, engine_arguments
from headwater.config.load import load_config
from headwater.config.schema import EngineConfig
from headwater.core.errors import RequestError, RolloutFailed, WeightsError, WeightsIncomplete
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.engine.engine import Engine
from headwater.models.checksum import checksum, dtype_of_checksum
from headwater.models.load import load_model, load_tokenizer
from headwater.observe.spans import Spans
from headwater.trainer.rollout_setup import make_engine
from headwater.weights import TRANSPORTS, shared_memory
from headwater.weights.publish import publish

MODEL = "tiny:qwen3"
LIMIT_S = 600.0
CONFIG = EngineConfig(deterministic=True, kv_cache_gib=0.02, max_prefill_tokens=64, decode_steps=4)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Here and in the child: so small a model is faster without a thread pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def served(one_thread) -> Iterator[NativeEngine]:
    place = OwnServer(MODEL, engine_arguments(CONFIG, shares_device=True), "float32")
    engine = NativeEngine(place, transfer="shared_memory", spans=Spans())
    yield engine
    pid = engine.pid
    engine.close()
    assert is_gone(pid)


@contextmanager
def inline(seed: int = 0) -> Iterator[Engine]:
    engine = Engine.load(MODEL, CONFIG, device="cpu", seed=seed)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def undisturbed(one_thread) -> Callable[..., list[ModelResponse]]:
    """What engines of this process say, by the seed of their weights."""
    engines: dict[int, Engine] = {}

    def generate(requests: list[ModelRequest], seed: int) -> list[ModelResponse]:
        if seed not in engines:
            engines[seed] = Engine.load(MODEL, CONFIG, device="cpu", seed=seed)
        return engines[seed].generate(requests)

    yield generate
    for engine in engines.values():
        engine.close()


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    model = load_model(MODEL, dtype="float32", device="cpu", seed=seed)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def requests(count: int, num_tokens: int, num_prompt: int = 5, **sampling: Any) -> list[ModelRequest]:
    params = SamplingParams(**{"max_new_tokens": num_tokens, "ignore_end": True, **sampling})
    return [
        ModelRequest(f"r{key}", tuple(6 + (7 * key + 13 * place) % 500 for place in range(num_prompt)), params, key)
        for key in range(count)
    ]


def bits(responses: list[ModelResponse]) -> list[Any]:
    return [(each.output_tokens, each.output_logprobs, each.stop_reason) for each in responses]


IsOver = Callable[[], bool]


def generate(
    engine: NativeEngine, asked: list[ModelRequest], meanwhile: Callable[[IsOver], Any] = lambda is_over: None
) -> list[ModelResponse]:
    """All responses; ``meanwhile`` happens in another thread, and can ask whether all of them have ended."""

    async def run() -> list[ModelResponse]:
        answers = asyncio.gather(*(engine.agenerate(each) for each in asked))
        await asyncio.sleep(0)  # all of them have asked
        await asyncio.to_thread(meanwhile, answers.done)
        return await asyncio.wait_for(answers, LIMIT_S)

    return asyncio.run(run())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def some_tokens(engine: NativeEngine, is_over: IsOver, least: int = 5) -> None:
    """Wait until a response has some tokens. On a busy machine, all may have ended before this is seen."""

    def has_some() -> bool:
        return any(each.num_tokens >= least for each in list(engine._server.requests._open.values()))

    wait_until(lambda: has_some() or is_over(), "no tokens come")


def test_the_same_bits_as_in_this_process(served, undisturbed):
    asked = [
        *requests(3, 20),
        *requests(2, 20, temperature=0.0),
        *requests(2, 30, num_prompt=70, temperature=0.8, top_p=0.9, ignore_end=False),
        *requests(2, 30, stop_strings=("a", "e", "1")),
    ]
    asked = [replace(each, request_id=f"{place}") for place, each in enumerate(asked)]
    first = generate(served, asked)
    assert bits(first) == bits(undisturbed(asked, 0))
    later = [replace(each, given_tokens=one.output_tokens[:7]) for each, one in zip(asked, first, strict=True)]
    assert bits(generate(served, later)) == bits(undisturbed(later, 0))
    assert {version for each in first for version in each.output_versions} == {0}


@pytest.mark.parametrize(("transfer", "seed"), [("shared_memory", 1), ("file", 2)])
def test_weights_arrive_bit_for_bit_and_leave_no_second_copy(served, undisturbed, transfer, seed):
    use_transport(served, transfer)
    before = mapped_shared_memory()
    served.update_weights(WeightUpdate.of(seed, weights(seed))).result(LIMIT_S)
    assert served.get_version() == seed
    with inline(seed) as engine:
        assert served.weights_checksum() == engine.weights_checksum()
    [response] = generate(served, requests(1, 10))
    assert bits([response]) == bits(undisturbed(requests(1, 10), seed))
    assert set(response.output_versions) == {seed}
    new = mapped_shared_memory() - before
    assert len(new) <= 1  # the slots, which the next update uses again
    wrong = served.update_weights(WeightUpdate.of(9, weights(0)[1:]))
    with pytest.raises(WeightsError, match="missing"):
        wrong.result(LIMIT_S)
    assert served.get_version() == seed
    assert mapped_shared_memory() - before == new


def mapped_shared_memory() -> set[str]:
    """The files of shared memory that this process has mapped. Other processes come and go."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}


def use_transport(engine: NativeEngine, name: str) -> None:
    engine._transport.close()
    engine._transport = TRANSPORTS.resolve(name)(torch.float32)


def rest_under(undisturbed, seed: int, request: ModelRequest, response: ModelResponse, count: int) -> list[Any]:
    """What these weights make of the request after its first ``count`` tokens."""
    return bits(undisturbed([replace(request, given_tokens=response.output_tokens[:count])], seed))


IN_FLIGHT = pytest.param("in_flight", 2, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("mode", "old", "new"), [("interrupt", 1, 2), IN_FLIGHT, ("drain", 1, 2)])
def test_an_update_while_it_generates(served, undisturbed, mode, old, new):
    """Up to the update the old weights speak, after it the new ones. ``old`` and ``new`` are their seeds."""
    use_transport(served, "shared_memory")
    for num_tokens in (32, 128, 512, 1500):
        version = served.get_version() + 1
        served.update_weights(WeightUpdate.of(version, weights(old))).result(LIMIT_S)
        before, update = served.weights_checksum(), WeightUpdate.of(version + 1, weights(new))
        asked = requests(3, num_tokens)

        def update_meanwhile(is_over: IsOver) -> None:
            some_tokens(served, is_over)
            served.update_weights(update, mode).result(LIMIT_S)  # noqa: B023

        responses = generate(served, asked, update_meanwhile)
        if mode == "drain" or all(0 < each.output_versions.count(version) < num_tokens for each in responses):
            break  # on a busy machine, short ones may end before the update
    for request, response, alone in zip(asked, responses, undisturbed(asked, old), strict=True):
        versions = response.output_versions
        count = versions.count(version)
        assert versions == (version,) * count + (version + 1,) * (num_tokens - count)
        assert count == num_tokens if mode == "drain" else 0 < count < num_tokens
        assert response.output_tokens[:count] == alone.output_tokens[:count]
        assert response.output_logprobs[:count] == alone.output_logprobs[:count]
        rest = [(response.output_tokens[count:], response.output_logprobs[count:], "length")]
        if mode == "interrupt":
            assert rest == rest_under(undisturbed, new, request, response, count)
        if mode == "in_flight":  # new weights over keys and values of the old ones: neither alone gives that
            assert rest != rest_under(undisturbed, new, request, response, count)
            assert rest != rest_under(undisturbed, old, request, response, count)
    after = served.weights_checksum()
    assert before != after == checksum(weights(new), dtype_of_checksum(after))
    later = requests(1, 8)
    assert bits(generate(served, later)) == bits(undisturbed(later, new)) != bits(undisturbed(later, old))


@pytest.mark.slow
def test_an_update_while_prompts_are_computed(served, undisturbed):
    """What was drawn stays; prompts that are half computed are computed anew; nothing is lost."""
    old, new = 1, 2

    def num_computed() -> int:
        return served._ask("/metrics.json")["num_tokens_prefilled"]

    for num_prompts in (4, 16, 32):
        version = served.get_version() + 1
        served.update_weights(WeightUpdate.of(version, weights(old))).result(LIMIT_S)
        asked, update = requests(num_prompts, 4, num_prompt=250), WeightUpdate.of(version + 1, weights(new))
        num_before = num_computed()

        def update_meanwhile(is_over: IsOver) -> None:
            wait_until(lambda: num_computed() > num_before, "no prompt is computed")  # noqa: B023
            served.update_weights(update, "interrupt").result(LIMIT_S)  # noqa: B023

        responses = generate(served, asked, update_meanwhile)
        counts = [each.output_versions.count(version) for each in responses]
        if 0 in counts:
            break  # on a busy machine, a few prompts may be computed before the update comes
    # Some had been computed under the old weights, which was in vain.
    assert num_computed() - num_before > num_prompts * 250
    assert 0 in counts, "all prompts had been computed before the update came"
    for request, response, count in zip(asked, responses, counts, strict=True):
        assert response.output_versions == (version,) * count + (version + 1,) * (4 - count)
        rest = [(response.output_tokens[count:], response.output_logprobs[count:], "length")]
        if count < 4:
            assert rest == rest_under(undisturbed, new, request, response, count)


def publish_again(engine: NativeEngine, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """As the trainer does it: a new process has no weights, and its requests wait for them."""
    wait_until(lambda: engine.status().needs_weights, "no new process")
    engine.update_weights(WeightUpdate.of(engine.get_version(), tensors)).result(LIMIT_S)


@pytest.mark.slow
def test_killed_half_way(served, undisturbed):
    """What fast tests show with a small server (``test_keeper.py``), with ours.

    Tokens, log-probs and versions are those of an engine that nobody disturbed; nothing is lost or made twice."""
    served.update_weights(WeightUpdate.of(40, weights(2))).result(LIMIT_S)
    weights_then, pid = served.weights_checksum(), served.pid
    asked = [*requests(5, 60), *requests(1, 60, stop_strings=("zzzz",))]

    def kill(is_over: IsOver) -> None:
        some_tokens(served, is_over)
        os.kill(served.pid, signal.SIGKILL)
        publish_again(served, weights(2))

    responses = generate(served, asked, kill)
    assert bits(responses) == bits(undisturbed(asked, 2))
    assert {each.output_versions for each in responses} == {(40,) * 60}
    assert served.pid != pid
    assert is_gone(pid)
    assert (served.get_version(), served.weights_checksum()) == (40, weights_then)


@pytest.mark.slow
def test_told_to_stop_while_paused(served, undisturbed):
    """SIGTERM answers requests with the tokens they have. They continue nevertheless, and only when resumed."""
    served.update_weights(WeightUpdate.of(50, weights(1))).result(LIMIT_S)
    served.set_version(51)
    asked, pid = requests(3, 40), served.pid

    def stop(is_over: IsOver) -> None:
        some_tokens(served, is_over)
        served.pause()
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: is_gone(pid) and served._server.keeper.is_settled, "no new child")
        publish_again(served, weights(1))
        assert served._ask("/metrics.json")["is_paused"]
        time.sleep(0.3)
        assert served._ask("/metrics.json")["num_tokens_generated"] == 0
        served.resume()

    responses = generate(served, asked, stop)
    assert bits(responses) == bits(undisturbed(asked, 1))
    assert {version for each in responses for version in each.output_versions} == {51}


def test_thousands_wait_over_one_connection_and_leave_at_once(served):
    served.pause()
    num_before = len(os.listdir("/proc/self/fd"))

    def num_waiting() -> int:
        return served._ask("/metrics.json")["num_waiting"]

    async def run() -> None:
        tasks = [asyncio.ensure_future(served.agenerate(each)) for each in requests(3000, 4)]
        await asyncio.to_thread(wait_until, lambda: num_waiting() == len(tasks), "not all have entered")
        assert len(os.listdir("/proc/self/fd")) < num_before + 20
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(wait_until, lambda: num_waiting() == 0, "not all have left")

    try:
        asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    finally:
        served.resume()
    assert len(generate(served, requests(1, 4))) == 1


def test_a_request_that_cannot_be_served_is_refused_as_in_this_process(served):
    with pytest.raises(RequestError, match="exceed the model's"):
        generate(served, requests(1, 100_000))
    served.sleep()
    served.wake()
    assert len(generate(served, requests(1, 4))) == 1


@pytest.mark.slow
def test_settings_reach_the_child_and_too_many_deaths_end_in_an_error(monkeypatch):
    loaded = load_config(
        None, ["rollout.placement=disaggregated", "engine.max_queue=77", "engine.kv_cache_gib=0.02", "run.seed=3"]
    )
    config = loaded.config
    engine = make_engine(BackendContext(config, MODEL, load_tokenizer(MODEL), Spans()))
    try:
        assert isinstance(engine, NativeEngine)
        info = engine._ask("/get_server_info")
        assert (info["max_queue"], info["kv_cache_gib"]) == (77, 0.02)
        with inline(3) as other:
            assert engine.weights_checksum() == other.weights_checksum()
        arguments = Path(f"/proc/{engine.pid}/cmdline").read_text()
        assert engine._server._place.api_key not in arguments
        monkeypatch.setattr(keeper, "MAX_RESTARTS", 0)

        def kill(is_over: IsOver) -> None:
            some_tokens(engine, is_over)
            os.kill(engine.pid, signal.SIGKILL)

        with pytest.raises(RolloutFailed, match=r"died 1 times in a row.*killed by SIGKILL; its output:\nloading tiny"):
            generate(engine, requests(2, 1500), kill)
        with pytest.raises(RolloutFailed, match="killed by SIGKILL"):
            engine.pause()
        with pytest.raises(RolloutFailed, match="killed by SIGKILL"):
            generate(engine, requests(1, 2))
    finally:
        engine.close()
        engine.close()
    with pytest.raises(RolloutFailed, match="closed"):
        generate(engine, requests(1, 2))


@pytest.mark.slow
def test_any_backend_that_can_be_served_runs_in_a_process():
    overrides = ["rollout.placement=disaggregated", "rollout.backend=hf", "rollout.timeout_s=5000", "run.seed=3"]
    config = load_config(None, overrides).config
    engine = make_engine(BackendContext(config, MODEL, load_tokenizer(MODEL), Spans()))
    try:
        assert isinstance(engine, NativeEngine)
        declared = BACKENDS.resolve("hf").declared_capabilities
        # The alternatives of tokens are not sent between the processes, and this model reads only text.
        features = tuple(each for each in declared.features if each != "top_logprobs")
        assert engine.capabilities == replace(declared, features=features, media=False)
        assert engine._update_limit_s == 5000
        for name in ("shared_memory", "file"):
            use_transport(engine, name)
            published = publish(Weights(), engine, 7)
            assert engine.weights_checksum() == published.serving
        [response] = generate(engine, requests(1, 6))
        assert (len(response.output_tokens), set(response.output_versions)) == (6, {7})
        os.kill(engine.pid, signal.SIGKILL)
        assert generate(engine, requests(1, 6))[0].output_tokens == response.output_tokens, "it has read the file"
    finally:
        engine.close()


class Weights:
    """A learner whose policy is the model with another seed."""

    def export(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield weights(1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in weights(1)}


def test_a_stream_that_breaks_off_stops_generation_until_a_complete_update(served, undisturbed, monkeypatch):
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 2**14)  # so that a tiny model needs several slots
    version, good = served.get_version() + 1, weights(1)

    def broken(tensors: list[tuple[str, torch.Tensor]]) -> WeightUpdate:
        def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
            yield from ([each] for each in tensors[:-1])
            yield [(tensors[-1][0], torch.full_like(tensors[-1][1], torch.nan))]

        return WeightUpdate(version, {name: tuple(tensor.shape) for name, tensor in tensors}, buckets())

    use_transport(served, "shared_memory")
    with pytest.raises(WeightsIncomplete, match="NaN"):
        served.update_weights(broken(good)).result(LIMIT_S)
    assert served.status().needs_weights
    asked = requests(2, 8)

    def complete(is_over: IsOver) -> None:
        wait_until(lambda: served.status().num_waiting == 2, "they wait")
        served.update_weights(WeightUpdate.of(version, good)).result(LIMIT_S)

    responses = generate(served, asked, complete)
    assert bits(responses) == bits(undisturbed(asked, 1))
    assert not served.status().needs_weights


def test_a_model_that_is_not_there_is_told_at_once():
    with pytest.raises(RolloutFailed, match=r"exit status 2 before it served no/such/model; its output:\n.*no/such"):
        NativeEngine(OwnServer("no/such/model"), transfer="file", spans=Spans())
