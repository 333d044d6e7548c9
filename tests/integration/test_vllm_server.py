"""A real vLLM server on the CPU: log-probs, interrupted responses, training, tensor parallelism, a router over
two servers, killed servers, wrong settings.

vLLM runs in a separate environment (``make setup-vllm``). One server is started for all tests of this file, and a
second one for some.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import CUT_DOWN, PROCESS_LIMIT_S, ROOT, after_step, headwater, is_gone, metrics, python_of, train_here
from listening import Process
from server_answers import (
    DIFFERENT,
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
from headwater.backends.router.engine import RouterEngine
from headwater.backends.vllm.engine import VllmEngine
from headwater.backends.vllm.weights import SLOT_LIMIT_S, SlotStream
from headwater.config.load import load_config
from headwater.core.errors import ConfigError, RolloutFailed, TransferLost, WeightsError, WeightsIncomplete
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelResponse, SamplingParams
from headwater.models.checksum import checksum
from headwater.models.device import with_dtype
from headwater.models.load import load_model, load_tokenizer
from headwater.observe.run_directory import RunDirectory
from headwater.observe.spans import Spans
from headwater.weights import shared_memory

PYTHON, IS_INSTALLED = python_of("vllm")
NO_VLLM = f"NO REAL VLLM: it is not installed for {PYTHON}; run `make setup-vllm`"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INSTALLED, reason=NO_VLLM),
    pytest.mark.xdist_group("vllm"),
]


def context(*settings: str, model: str = MODEL) -> BackendContext:
    base = ["rollout.backend=vllm", "data.max_prompt_tokens=64", "rollout.max_new_tokens=256", f"model.path={model}"]
    config = with_dtype(load_config("quickstart", [*base, *settings]).config)
    return BackendContext(config, model, load_tokenizer(model), Spans())


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    launch = ("rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}")
    engine = VllmEngine.launch(context(*launch), ["cpu"])
    yield engine
    processes = group(engine._server.pid)
    engine.close()
    assert len(processes) > 1
    deadline = time.monotonic() + LIMIT_S
    while left := [each for each in processes if not is_gone(each)]:
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def sharded(engine: VllmEngine) -> Iterator[VllmEngine]:
    """A second server, of two workers that have half of the weights each. It has the key of the first one."""
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        patch.setattr(secrets, "token_urlsafe", lambda _: engine.api_key)
        launch = ("rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}")
        second = VllmEngine.launch(context(*launch, "rollout.launch.tensor_parallel=2"), ["cpu", "cpu"])
    yield second
    second.close()


def group(leader: int) -> list[int]:
    """The processes of a server."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[2]) == leader:
                found.append(int(stat.parent.name))
    return found


def until_running(engine: VllmEngine, count: int, is_over: Callable[[], bool]) -> None:
    """Until the server generates, or has ended all responses before that was seen."""
    while engine.status().num_running < count and not is_over():
        time.sleep(0.02)


def test_logprobs_are_those_of_the_published_weights(engine: VllmEngine) -> None:
    plain = SamplingParams(24, ignore_end=True)
    for sampling in (plain, SamplingParams(24, temperature=0.7, ignore_end=True), SamplingParams(24, 0.9, top_k=9)):
        for response in asyncio.run(ask(engine, 4, sampling)):
            assert_sampled_by({engine.get_version(): weights(0)}, response, sampling)
    for version in (1, 2):
        publish(engine, weights(version), version)
        greedy = SamplingParams(24, temperature=0.0, ignore_end=True)
        for sampling in (plain, greedy):
            for response in asyncio.run(ask(engine, 4, sampling)):
                assert_sampled_by({version: weights(version)}, response, sampling)


TRANSFERS = ("shared_memory", "collective", "file")


@contextmanager
def client(engine: VllmEngine, *settings: str) -> Iterator[VllmEngine]:
    """Another owner of a running server, which sends its weights in many slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SERVER_KEY, engine.api_key)
        patch.setattr(shared_memory, "_SLOT_BYTES", 2**18)
        owner = VllmEngine.connect(engine.url, context(f"rollout.servers=[{engine.url}]", *settings))
        try:
            yield owner
        finally:
            owner.close()


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("server", ["engine", "sharded"])
def test_every_transfer_brings_all_weights_to_all_workers(
    server: str, transfer: str, request: pytest.FixtureRequest
) -> None:
    """The second server has two workers that hold half of the weights each."""
    running = request.getfixturevalue(server)
    if server == "sharded":
        first = request.getfixturevalue("engine")
        assert len(group(running._server.pid)) > len(group(first._server.pid)), "it has more workers"
    with client(running, f"rollout.weight_transfer={transfer}") as owner:
        assert owner.capabilities.file_weights == (transfer == "file") != owner.capabilities.checksums
        for version in (1, 2):
            publish(owner, weights(version), version)
            if transfer != "file":
                assert owner.weights_checksum() == checksum(weights(version).named_parameters())
            for sampling in (SamplingParams(24, ignore_end=True), SamplingParams(24, temperature=0.0, ignore_end=True)):
                for response in asyncio.run(ask(owner, 4, sampling)):
                    assert_sampled_by({version: weights(version)}, response, sampling)


@pytest.mark.parametrize("transfer", TRANSFERS[:2])
def test_an_update_that_breaks_needs_another_one(engine: VllmEngine, transfer: str) -> None:
    """vLLM must not mix the parts of layers that it has got with the next weights."""

    def broken() -> Iterator[Any]:
        tensors = list(weights(5).named_parameters())
        yield from ([each] for each in tensors[: len(tensors) // 2])
        raise WeightsError("the learner has failed")

    with client(engine, f"rollout.weight_transfer={transfer}") as owner:
        update = WeightUpdate.of(1, weights(5).named_parameters())
        with pytest.raises(WeightsIncomplete, match="the learner has failed"):
            owner.update_weights(replace(update, buckets=broken())).result(LIMIT_S)
        assert owner.status().needs_weights
        publish(owner, weights(6), 2)
        (response,) = asyncio.run(ask(owner, 1, SamplingParams(24, ignore_end=True)))
        assert_sampled_by({2: weights(6)}, response, SamplingParams(24))


VANISHING = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from test_vllm_server import VllmEngine, WeightUpdate, context, replace, shared_memory, weights

def slow():
    tensors = list(weights(7).named_parameters())
    yield from ([each] for each in tensors[: len(tensors) // 2])
    print("half", flush=True)
    time.sleep(3600)

shared_memory._SLOT_BYTES = 2**16
engine = VllmEngine.connect(sys.argv[3], context(f"rollout.servers=[{sys.argv[3]}]", sys.argv[4]))
update = WeightUpdate.of(1, weights(7).named_parameters())
engine.update_weights(replace(update, buckets=slow())).result(3600)
"""


@pytest.mark.parametrize("transfer", TRANSFERS[:2])
def test_a_server_whose_sender_is_killed_takes_the_weights_of_the_next_one(engine: VllmEngine, transfer: str) -> None:
    here = Path(__file__).parent
    setting = f"rollout.weight_transfer={transfer}"
    sender = subprocess.Popen(
        [sys.executable, "-c", VANISHING, here, here.parent / "unit", engine.url, setting],
        env=os.environ | {SERVER_KEY: engine.api_key}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert sender.stdout is not None
    assert sender.stdout.readline() == "half\n"
    sender.kill()
    sender.wait(LIMIT_S)
    began = time.monotonic()
    with client(engine, setting) as owner:
        assert owner.status().needs_weights
        publish(owner, weights(8), 1)
        assert time.monotonic() - began < SLOT_LIMIT_S, "the workers have noticed it, and have not waited for a limit"
        (response,) = asyncio.run(ask(owner, 1, SamplingParams(24, ignore_end=True)))
        assert_sampled_by({1: weights(8)}, response, SamplingParams(24))


def test_responses_that_span_an_update_lose_no_token(engine: VllmEngine) -> None:
    for mode in ("interrupt", "in_flight", "drain"):
        # On a busy machine, all responses may end before the update, or all requests may arrive after it.
        while not updated_while_generating(engine, mode):
            pass


def updated_while_generating(engine: VllmEngine, mode: str) -> bool:
    """Whether a response has tokens of both versions, or for "drain" whether one was generated before the update."""
    sampling = SamplingParams(160, temperature=0.8, ignore_end=True)
    old = engine.get_version()
    publish(engine, weights(old), old)
    answers: list[ModelResponse] = []
    thread = threading.Thread(target=lambda: answers.extend(asyncio.run(ask(engine, 6, sampling))))
    thread.start()
    while engine.status().num_running < 6 and thread.is_alive():
        time.sleep(0.02)
    publish(engine, weights(old + 1), old + 1, mode)
    thread.join(LIMIT_S)
    assert len(answers) == 6
    for response in answers:
        assert (response.output_len, response.stop_reason) == (160, "length")
        assert list(response.output_versions) == sorted(response.output_versions)
        num_old = response.output_versions.count(old)
        if mode == "in_flight" and 0 < num_old < 160:
            # Its new tokens attend to keys and values of the old weights.
            assert_continued(weights(old), weights(old + 1), num_old, response, sampling)
        else:
            assert_sampled_by({old: weights(old), old + 1: weights(old + 1)}, response, sampling)
    counts = {response.output_versions.count(old) for response in answers}
    while engine.status().num_running:  # as the server says, which is a moment later
        time.sleep(0.02)
    if mode == "drain":
        assert counts <= {0, 160}
        return 160 in counts
    return bool(counts - {0, 160})


def test_ends_aborts_and_pauses(engine: VllmEngine) -> None:
    tokenizer = load_tokenizer(MODEL)
    (free,) = asyncio.run(ask(engine, 1, SamplingParams(60, temperature=0.0, ignore_end=True)))
    stop = tokenizer.decode([free.output_tokens[20]]).strip() or tokenizer.decode([free.output_tokens[21]])
    (stopped,) = asyncio.run(ask(engine, 1, SamplingParams(60, 0.0, ignore_end=True, stop_strings=(stop,))))
    assert stopped.stop_reason == "stop"
    assert stop in tokenizer.decode(list(stopped.output_tokens))
    assert stop not in tokenizer.decode(list(stopped.output_tokens[:-1]))
    token = free.output_tokens[10]
    (ended,) = asyncio.run(ask(engine, 1, SamplingParams(60, 0.0, stop_token_ids=(token,), ignore_end=True)))
    assert ended.output_tokens == free.output_tokens[: free.output_tokens.index(token) + 1]

    async def aborted() -> ModelResponse:
        task = asyncio.ensure_future(ask(engine, 1, SamplingParams(200, ignore_end=True)))
        await asyncio.to_thread(until_running, engine, 1, task.done)
        num_aborted = await asyncio.to_thread(engine.abort, "request-0")
        response = (await task)[0]
        assert num_aborted >= (response.stop_reason == "abort"), "it may also end by itself while it is aborted"
        return response

    # On a busy machine, it may end before it is aborted, or be aborted before its first or after its last token.
    for _ in range(20):
        response = asyncio.run(aborted())
        if response.stop_reason == "abort" and 0 < response.output_len < 200:
            break
    assert response.stop_reason == "abort"
    assert 0 < response.output_len < 200
    engine.pause()
    thread = threading.Thread(target=lambda: asyncio.run(ask(engine, 1, SamplingParams(4))))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    engine.resume()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_wrong_weights_models_and_settings_are_refused(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    version = engine.get_version()
    publish(engine, weights(1), version + 1)
    narrow = [(name, each[:1]) for name, each in weights(2).named_parameters()]
    with pytest.raises(WeightsError, match="shape"):
        engine.update_weights(WeightUpdate.of(version + 2, narrow)).result(LIMIT_S)
    (response,) = asyncio.run(ask(engine, 1, SamplingParams(8, ignore_end=True)))
    assert_sampled_by({version + 1: weights(1)}, response, SamplingParams(8))
    servers = f"rollout.servers=[{engine.url}]"
    with pytest.raises(RolloutFailed, match=SERVER_KEY):
        VllmEngine.connect(engine.url, context(servers))
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    with pytest.raises(ConfigError, match="another model"):
        VllmEngine.connect(engine.url, context(servers, model="tiny:llama"))
    with pytest.raises(ConfigError, match=r"rollout\.publish = adapter.*without adapters; start it with --enable-lora"):
        VllmEngine.connect(engine.url, context(servers, "lora.rank=4", "rollout.publish=adapter"))
    nowhere = "http://127.0.0.1:9"
    with pytest.raises(RolloutFailed, match="cannot be reached"):
        VllmEngine.connect(nowhere, context(f"rollout.servers=[{nowhere}]", "rollout.server_timeout_s=1"))


def test_a_run_ahead_learns_through_a_running_server(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates arrive while the server generates for the next step."""
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    settings = ["rollout.backend=vllm", f"rollout.servers=[{engine.url}]", f"run.root={tmp_path}", "run.name=learns"]
    settings += ["trainer.total_steps=25", "eval.before=false", "rollout.max_staleness=1"]
    train_here("quickstart", *settings)
    records = metrics(tmp_path / "learns", "train")
    rewards = [record["reward/mean"] for record in records]
    assert sum(rewards[:5]) / 5 < 0.4  # 0.25 when it was measured
    assert sum(rewards[-5:]) / 5 > 0.6, rewards  # 0.87
    fresh = [each["rollout_gap/logprob_abs_mean"] for each in records if not each.get("staleness/lag_1")]
    assert max(fresh) < TOLERANCE, "tokens of the newest version have the log-probs of the learner's weights"
    assert all(0 < each["time/weights_pause_s"] <= each["time/weights_s"] for each in records)
    lags = {name for each in records for name, value in each.items() if name.startswith("staleness/lag_") and value}
    assert lags == {"staleness/lag_0", "staleness/lag_1"}, "it generates at most one version ahead"
    counts = RunDirectory.open(tmp_path / "learns").read_ledger()[-1]["counts"]
    assert (counts["dropped"], counts["in_flight"], counts["buffered"]) == (0, 0, 0)
    assert counts["dispatched"] == counts["trained"]


def test_only_the_run_reaches_its_server_and_a_cpu_has_no_memory_to_release(engine: VllmEngine) -> None:
    for path in ("/version", "/server_info", "/is_paused", "/v1/models"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(engine.url + path, timeout=LIMIT_S)
        assert refused.value.code == 401
    assert engine.capabilities.memory_tags == ()
    with pytest.raises(RolloutFailed, match="cannot release its memory"):
        engine.sleep()


@pytest.mark.parametrize(("layer", "transfer"), [("tied", "collective"), ("untied", "auto")])
def test_vllm_runs_in_this_process(layer: str, transfer: str) -> None:
    """In the process of vLLM's Python, which finds Headwater's source code: generation, an update and log-probs. The
    output layer of the second model does not share its weights with the embedding."""
    script = Path(__file__).with_name("vllm_in_process.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [PYTHON, script, layer, transfer],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=False,
    )
    if "NO PACKAGE" in done.stdout:
        pytest.skip(f"{PYTHON} lacks a package of Headwater: {done.stdout.strip()[-200:]}")
    assert done.stdout.strip().endswith("all is well"), done.stdout[-2000:] + done.stderr[-2000:]


def test_a_run_trains_with_vllm_in_its_process(tmp_path: Path) -> None:
    """Three steps, in vLLM's environment. Its log-probs are the learner's after every update, so it has the weights."""
    settings = [
        "rollout.backend=vllm",
        *CUT_DOWN,
        "trainer.total_steps=3",
        "eval.num_prompts=4",
        f"run.root={tmp_path}",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [PYTHON, "-m", "headwater", "train", "quickstart", *settings],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False,
    )  # fmt: skip
    if "No module named" in done.stderr and done.returncode:
        pytest.skip(f"{PYTHON} lacks a package of Headwater: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = metrics(tmp_path / "quickstart", "train")
    assert [each["step"] for each in steps] == [1, 2, 3]
    assert max(each["rollout_gap/logprob_abs_max"] for each in steps) < TOLERANCE
    ledger = RunDirectory.open(tmp_path / "quickstart").read_ledger()
    assert len({each["weights"] for each in ledger if each["kind"] == "step"}) == 3, "every step changes the weights"
    assert ledger[-1]["counts"] == {"dispatched": 12, "trained": 12, "dropped": 0, "buffered": 0, "in_flight": 0}


def test_exported_adapters_are_served_and_answer_as_the_merged_model(tmp_path: Path) -> None:
    train_here("quickstart-lora", *CUT_DOWN, "warm_start.num_steps=10", f"run.root={tmp_path}", "run.name=lora")
    for form in ("--merge", "--adapter"):
        result = headwater("export", tmp_path / "lora", "--to", tmp_path / form, form)
        assert result.code == 0, result.stderr
    merged, base = (
        load_model(str(each), dtype="float32", device="cpu", seed=0) for each in (tmp_path / "--merge", MODEL)
    )
    options = f"[--enable-lora, --max-lora-rank, '64', --lora-modules, trained={tmp_path / '--adapter'}]"
    launch = ("rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}", f"rollout.launch.args={options}")
    server, prompt = VllmEngine.launch(context(*launch), ["cpu"]), [5, 6, 7, 8]
    try:
        for name, model, other in (("trained", merged, base), ("policy", base, merged)):
            output, own = completed(server, name, prompt)
            assert len(output) == 24
            assert float((logprobs(model, prompt, output) - own).abs().max()) < TOLERANCE, name
            assert float((logprobs(other, prompt, output) - own).abs().max()) > DIFFERENT, name
    finally:
        server.close()


def completed(engine: VllmEngine, name: str, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The tokens that a served model samples as any client asks for them, and their log-probs."""
    body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    body |= {"logprobs": 1, "return_tokens_as_token_ids": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {engine.api_key}"}
    request = urllib.request.Request(f"{engine.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        answer = json.load(reply)["choices"][0]["logprobs"]
    return [int(each.removeprefix("token_id:")) for each in answer["tokens"]], torch.tensor(answer["token_logprobs"])


def test_the_route_command_is_an_endpoint_over_vllm_servers(
    engine: VllmEngine, sharded: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (engine, sharded):
        publish(each, weights(4), each.get_version() + 1)
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    router = Process("route", engine.url, sharded.url, "--backend", "vllm", "--port", 0)
    sampling = {"max_new_tokens": 16, "temperature": 0.8, "ignore_eos": True}
    prompt = [5, 6, 7, 8]
    try:
        for drained in (sharded, engine):  # so that each of them answers
            assert router.call("/servers/drain", {"name": drained.url})[0] == 200
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            status, answer = router.call("/generate", body)
            assert status == 200, answer
            own = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
            assert len(own) == 16
            theirs = logprobs(weights(4), prompt, answer["output_ids"], temperature=0.8)
            assert float((theirs - torch.tensor(own)).abs().max()) < TOLERANCE
            served = router.call("/v1/models")[1]["data"][0]["id"]
            body = {"model": served, "prompt": "12+34=", "max_tokens": 8, "ignore_eos": True}
            status, answer = router.call("/v1/completions", body)
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == 8
            assert router.call("/servers/undrain", {"name": drained.url})[0] == 200
    finally:
        router.end()


def test_a_run_over_two_servers_continues_without_a_killed_one(
    engine: VllmEngine, sharded: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its responses are continued by the other server, under the same weights."""
    routers: list[RouterEngine] = []
    make = RouterEngine.__init__

    def make_and_keep(self: RouterEngine, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        routers.append(self)

    def kill() -> None:
        client = routers[0]._roster.member(url).engine
        assert isinstance(client, VllmEngine)
        while not is_over.wait(0.02):
            if client.status().num_running < 2:  # now: the status of the router is a second old
                continue
            os.killpg(sharded._server.pid, signal.SIGSTOP)
            is_busy = False
            with suppress(RolloutFailed):  # the run has ended meanwhile
                is_busy = still_answers(client)
            os.killpg(sharded._server.pid, signal.SIGKILL if is_busy else signal.SIGCONT)
            if is_busy:
                sharded.close()  # otherwise it would start another one
                return

    url, is_over = sharded.url, threading.Event()
    killer = threading.Thread(target=kill, daemon=True)
    monkeypatch.setattr(RouterEngine, "__init__", make_and_keep)
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    settings = [
        *("rollout.backend=vllm", f"rollout.servers=[{engine.url}, {url}]", f"run.root={tmp_path}", *CUT_DOWN),
        *("trainer.total_steps=6", "rollout.max_new_tokens=160", "eval.before=false", "eval.after=false"),
        "algorithm.old_logprobs=recompute",
    ]
    try:
        with after_step(1, killer.start):
            train_here("quickstart", *settings)
    finally:
        is_over.set()  # a server that was not busy is not killed later, in another test
    killer.join(LIMIT_S)
    counters = routers[0].status().metrics
    assert counters["router_num_servers_lost"] >= 1
    assert counters["router_num_requests_moved"] >= 1
    gaps = [each["rollout_gap/logprob_abs_max"] for each in metrics(tmp_path / "quickstart", "train")]
    assert len(gaps) == 6
    assert max(gaps) < TOLERANCE, "all tokens are of the weights that the learner had"
    ledger = RunDirectory.open(tmp_path / "quickstart").read_ledger()
    assert ledger[-1]["counts"] == {"dispatched": 24, "trained": 24, "dropped": 0, "buffered": 0, "in_flight": 0}
    assert len({each["weights"] for each in ledger if each["kind"] == "step"}) == 6, "every step changes the weights"


def test_a_killed_server_is_replaced_and_loses_no_token(engine: VllmEngine) -> None:
    version = engine.get_version() + 1
    publish(engine, weights(3), version)
    sampling = SamplingParams(200, ignore_end=True)
    for _ in range(20):
        answers: list[ModelResponse] = []
        thread = threading.Thread(target=lambda: answers.extend(asyncio.run(ask(engine, 6, sampling))))  # noqa: B023
        thread.start()
        until_running(engine, 6, lambda: not thread.is_alive())  # noqa: B023
        os.kill(engine._server.pid, signal.SIGSTOP)
        if still_answers(engine):
            break  # on a busy machine, all may have ended before that is seen
        os.kill(engine._server.pid, signal.SIGCONT)
    os.kill(engine._server.pid, signal.SIGKILL)
    restored(engine, version)
    thread.join(LIMIT_S)
    assert engine.status().num_restarts == 1
    assert len(answers) == 6
    for response in answers:
        assert response.output_len == 200
        assert_sampled_by({version: weights(3)}, response, sampling)


def restored(engine: VllmEngine, version: int) -> None:
    """Publish again to the process that replaces the server, as a run does: shared memory does not survive it."""
    deadline = time.monotonic() + LIMIT_S
    while not engine.status().needs_weights:
        assert time.monotonic() < deadline, "no process has replaced the server"
        time.sleep(0.1)
    publish(engine, weights(3), version)


def test_a_server_that_is_killed_during_an_update_gets_it_again(engine: VllmEngine) -> None:
    version, before = engine.get_version() + 1, engine.status().num_restarts

    def killing() -> Iterator[Any]:
        tensors = list(weights(3).named_parameters())
        yield from ([each] for each in tensors[: len(tensors) // 2])
        os.killpg(engine._server.pid, signal.SIGKILL)
        yield from ([each] for each in tensors[len(tensors) // 2 :])

    update = WeightUpdate.of(version, weights(3).named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_SLOT_BYTES", 2**18)
        assert isinstance(engine._stream, SlotStream)
        engine._replaced.append(engine._stream)
        engine._chosen = SlotStream(torch.float32)  # with small slots
        with pytest.raises(TransferLost):
            engine.update_weights(replace(update, buckets=killing())).result(LIMIT_S)
        restored(engine, version)
    assert engine.status().num_restarts == before + 1
    (response,) = asyncio.run(ask(engine, 1, SamplingParams(24, ignore_end=True)))
    assert_sampled_by({version: weights(3)}, response, SamplingParams(24))
