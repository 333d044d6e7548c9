"""Runs and engines over servers that someone else has started (``rollout.servers``)."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command import CUT_DOWN, after_step, headwater, metrics, train_here
from ports import free_port
from running import Running

from headwater.backends import BackendContext
from headwater.backends.fleet import make_fleet
from headwater.backends.router import updates
from headwater.backends.router.engine import RouterEngine
from headwater.backends.router.member import Member
from headwater.config.load import load_config
from headwater.core.errors import HeadwaterError, RequestError, RolloutFailed, ServerLost
from headwater.core.protocols import Bucket, InferenceEngine, WeightUpdate
from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingParams
from headwater.models.device import with_dtype
from headwater.models.load import load_model, load_tokenizer
from headwater.observe.run_directory import RunDirectory
from headwater.observe.spans import Spans
from headwater.weights.file import FileWeights

MODEL = "tiny:qwen3"
LIMIT_S = 300.0
SHORT = [*CUT_DOWN, "eval.before=false", "eval.after=false"]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Running, Running]]:
    pair = (Running("engine.deterministic=true").start(), Running("engine.deterministic=true").start())
    try:
        yield (pair[0].ready(), pair[1].ready())
    finally:
        for each in pair:
            each.kill()


def named(*servers: Running) -> list[str]:
    return ["rollout.backend=native", f"rollout.servers=[{', '.join(each.url for each in servers)}]"]


@contextmanager
def connected(*servers: Running, settings: tuple[str, ...] = ()) -> Iterator[InferenceEngine]:
    config = load_config(None, [*named(*servers), *settings]).config
    context = BackendContext(config, MODEL, load_tokenizer(MODEL), Spans())
    engine = make_fleet(context)
    try:
        yield engine
    finally:
        engine.close()


def update(version: int, seed: int = 0) -> WeightUpdate:
    model = load_model(MODEL, dtype="float32", device="cpu", seed=seed)
    return WeightUpdate.of(version, [(name, value.detach()) for name, value in model.named_parameters()])


def generate(engine: InferenceEngine, count: int, num_tokens: int) -> list[ModelResponse]:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_end=True)
    requests = [ModelRequest(f"r{n}", (5, 6, 7 + n), sampling, rng_key=n) for n in range(count)]

    async def run() -> list[ModelResponse]:
        return await asyncio.wait_for(asyncio.gather(*map(engine.agenerate, requests)), LIMIT_S)

    return asyncio.run(run())


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except HeadwaterError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_two_running_servers_generate_what_the_embedded_engine_does(servers, tmp_path):
    """At staleness 0, bit for bit: the randomness of a token does not depend on who samples it."""
    settings = [*SHORT, f"run.root={tmp_path}", "engine.deterministic=true"]
    checksums = {}
    for name, place in {"inside": [], "servers": named(*servers)}.items():
        train_here("quickstart", *settings, f"run.name={name}", *place)
        checksums[name] = [record["weights"] for record in RunDirectory.open(tmp_path / name).read_ledger()]
    assert checksums["inside"] == checksums["servers"]
    status = json.loads((tmp_path / "servers" / "status.json").read_text())
    assert [each["url"] for each in status["servers"]] == [each.url for each in servers]
    told = headwater("doctor", tmp_path / "servers")
    assert all(each.url in told.stdout for each in servers), told.stdout
    told = headwater("eval", tmp_path / "servers", "eval.num_prompts=2")
    assert told.code == 0, told.stderr


def test_a_run_ahead_over_two_servers_loses_no_group(servers, tmp_path, monkeypatch):
    """The servers still serve the last version of the run before. Every version is written once, for both of them."""
    names, write = [], FileWeights.write

    def write_and_note(self: FileWeights, buckets: Iterable[Bucket]) -> None:
        names.append(self.path.parent.name)
        write(self, buckets)
        names.append(self.path.parent.name)

    monkeypatch.setattr(FileWeights, "write", write_and_note)
    settings = [*SHORT, "rollout.max_staleness=2", "trainer.total_steps=4", "rollout.weight_transfer=file"]
    folder = tmp_path / "weights"
    train_here("quickstart", *settings, *named(*servers), f"run.root={tmp_path}", f"rollout.weight_folder={folder}")
    record = RunDirectory.open(tmp_path / "quickstart").read_ledger()[-1]
    assert record["counts"] == {"dispatched": 16, "trained": 16, "dropped": 0, "buffered": 0, "in_flight": 0}
    assert list(folder.iterdir()) == [], "weights of old versions are removed"
    assert all(name.endswith(".partial") for name in names[::2]), "a file has its final name when it is complete"
    assert [name.rpartition("-")[2] for name in names[1::2]] == [f"v{version:06d}" for version in range(5)]
    assert lags(tmp_path / "quickstart") <= {0, 1, 2}


def lags(run: Path) -> set[int]:
    """How many versions old the trained tokens were."""
    prefix = "staleness/lag_"
    names = {
        name for each in metrics(run, "train") for name, value in each.items() if name.startswith(prefix) and value
    }
    return {int(name.removeprefix(prefix)) for name in names}


@pytest.mark.slow
def test_what_two_servers_generated_ahead_is_replayed_to_the_same_bits(servers, tmp_path):
    """With weights that the learner sends to both servers at once, in the middle of responses."""
    settings = [*SHORT, "trainer.total_steps=3", "rollout.max_staleness=2", "rollout.max_new_tokens=24",
                "rollout.max_concurrent_groups=6", "algorithm.policy_loss=decoupled", "engine.deterministic=true",
                "algorithm.old_logprobs=recompute", "rollout.weight_transfer=collective"]  # fmt: skip
    for number in range(5):
        run = tmp_path / f"run{number}"
        train_here("quickstart", *settings, *named(*servers), f"run.root={tmp_path}", f"run.name={run.name}")
        records = RunDirectory.open(run).read_ledger()
        parts = [made for record in records for group in record["trained"] for _, _, made in group["requests"]]
        if is_mixed := any(len(made) > 1 for made in parts):
            break  # on a busy machine, every response may end between two updates
    assert is_mixed, "no update came in the middle of a response"
    assert lags(run) <= {0, 1, 2}
    told = headwater("replay", run)
    assert told.code == 0, told.stderr
    assert "The weights of all 3 steps equal the recorded ones, bit for bit" in told.stdout


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shared_memory", "file", "collective"])
def test_a_rolling_update_lets_the_other_server_generate(servers, tmp_path, monkeypatch, transfer):
    """A conversation goes on while one server has the old version and the other one the new: it never goes back."""
    turns: list[int] = []
    routers: list[RouterEngine] = []
    make, send = RouterEngine.__init__, updates._send

    def make_and_keep(self: RouterEngine, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        routers.append(self)

    def send_after_a_turn(update: WeightUpdate, mode: Any, members: Mapping[str, Member], *rest: Any) -> Any:
        [updated] = members.values()
        [other] = [each for each in routers[-1]._roster.all() if each is not updated]
        if update.version:  # before the first update, the other one has no weights of the run
            states = {each.name: each.state for each in routers[-1].status().servers}
            assert states == {updated.name: f"taking the weights of version {update.version}", other.name: "serving"}
            asked = ModelRequest(f"t{len(turns)}", (5, 6), SamplingParams(2, ignore_end=True), 0, session="watched")
            turn = asyncio.run(asyncio.wait_for(routers[-1].agenerate(asked), LIMIT_S))
            assert set(turn.output_versions) == {other.version}
            turns.append(other.version)
        return send(update, mode, members, *rest)

    settings = [*SHORT, "trainer.total_steps=2", "rollout.max_staleness=2", "rollout.max_new_tokens=48",
                "rollout.max_concurrent_groups=4", "algorithm.policy_loss=decoupled", "engine.deterministic=true",
                "algorithm.old_logprobs=recompute", "rollout.update_order=rolling",
                f"rollout.weight_transfer={transfer}"]  # fmt: skip
    with monkeypatch.context() as patched:  # and not the replay
        patched.setattr(RouterEngine, "__init__", make_and_keep)
        patched.setattr(updates, "_send", send_after_a_turn)
        train_here("quickstart-multi-turn", *settings, *named(*servers), f"run.root={tmp_path}")
    run = tmp_path / "quickstart-multi-turn"
    # While the first server takes version 1, the other one has 0; while that one takes it, the first has 1; and so on.
    assert turns == [0, 1, 1, 2]
    record = RunDirectory.open(run).read_ledger()[-1]
    assert record["counts"] == {"dispatched": 8, "trained": 8, "dropped": 0, "buffered": 0, "in_flight": 0}
    assert lags(run) <= {0, 1, 2}
    for step in (1, 2):
        for row in pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist():
            made = [version for version in row["versions"] if version >= 0]
            assert made == sorted(made), "an episode went back to older weights"
    told = headwater("doctor", run).stdout
    assert all(f"{each.url}: version 2" in told for each in servers), told
    told = headwater("replay", run)
    assert "The weights of all 2 steps equal the recorded ones, bit for bit" in told.stdout, told.stderr


def test_a_server_gets_the_weights_of_the_run_first_and_keeps_them_over_a_broken_connection(servers):
    with connected(servers[0]) as engine:
        assert engine.status().needs_weights
        engine.update_weights(update(3, seed=1)).result(LIMIT_S)
        expected = generate(engine, 2, 8)
        assert {version for each in expected for version in each.output_versions} == {3}
        checksum = engine.weights_checksum()
        engine._server.keeper.kill("a test breaks the connection")
        until(lambda: engine.status().num_restarts == 1 and engine.status().is_reachable, "it comes back")
        assert not engine.status().needs_weights, "its process is the same"
        assert [each.output_tokens for each in generate(engine, 2, 8)] == [each.output_tokens for each in expected]
        assert engine.weights_checksum() == checksum


def test_a_server_that_another_program_uses_is_noticed(servers):
    with connected(servers[0]) as engine:
        engine.update_weights(update(1)).result(LIMIT_S)
        with connected(servers[0]) as other:
            other.update_weights(update(9, seed=2)).result(LIMIT_S)
        with pytest.raises(RolloutFailed, match=r"serves version 9, but this run gave it version 1: another program"):
            engine.update_weights(update(2)).result(LIMIT_S)


def test_a_server_with_another_model_or_without_a_needed_setting_is_refused(servers, tmp_path):
    run = ["train", "quickstart", *SHORT, f"run.root={tmp_path}", *named(*servers)]
    told = headwater(*run, "model.path=tiny:llama")
    assert told.code != 0
    assert "weight update refused" in told.stderr, told.stderr
    told = headwater(*run, "rollout.max_new_tokens=5000", "learner.max_tokens_per_microbatch=9000")
    assert told.code != 0
    assert "over the 2048 positions" in told.stderr


def test_an_address_without_a_usable_server_is_named(tmp_path):
    run = [
        "train",
        "quickstart",
        *SHORT,
        f"run.root={tmp_path}",
        "rollout.server_timeout_s=1",
        "rollout.backend=native",
    ]
    port = free_port()
    told = headwater(*run, f"rollout.servers=[http://127.0.0.1:{port}]")
    assert told.code != 0
    assert f"the server http://127.0.0.1:{port} cannot be reached, after 1 s" in told.stderr, told.stderr
    assert "correct rollout.servers" in told.stderr
    with socket.create_server(("127.0.0.1", 0)) as garbage:
        port = garbage.getsockname()[1]

        def answer() -> None:
            while True:
                try:
                    client, _ = garbage.accept()
                except OSError:
                    return
                with client:
                    client.recv(4096)
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<htm>")

        threading.Thread(target=answer, daemon=True).start()
        told = headwater(*run, f"rollout.servers=[http://127.0.0.1:{port}]", "rollout.server_timeout_s=5")
        garbage.shutdown(socket.SHUT_RDWR)
    assert told.code != 0
    assert "is not a `headwater serve` of this version (status 200: '<htm>')" in told.stderr, told.stderr


def test_a_server_that_stops_answering_hands_its_requests_over_with_their_tokens(servers):
    """After twice the heartbeat at most. When it answers again, it is used again."""
    server = servers[1]
    with connected(server, settings=("rollout.server_timeout_s=10",)) as engine:
        engine._server._hands_over = True  # as if there were others
        engine.update_weights(update(1)).result(LIMIT_S)
        thread, results = in_background(lambda: generate(engine, 1, 1500))
        until(lambda: engine._server.requests.num_started > 0, "it generates")
        server.signal(signal.SIGSTOP)
        try:
            thread.join(LIMIT_S)
        finally:
            server.signal(signal.SIGCONT)
        assert isinstance(results[0], ServerLost)
        partial = results[0].partial
        assert partial is not None
        assert partial.stop_reason == "abort"
        until(lambda: engine.status().is_reachable, "it is used again")
        again = generate(engine, 1, len(partial.output_tokens))[0]
        assert again.output_tokens == partial.output_tokens


OTHER_WAYS = [("file", "in_flight"), ("collective", "interrupt"), ("file", "interrupt")]


@pytest.mark.parametrize(
    "ways", [[("collective", "in_flight")], pytest.param(OTHER_WAYS, marks=pytest.mark.slow)], ids=["one", "others"]
)
def test_a_response_over_sglangs_calls_spans_an_update_without_losing_a_token(servers, ways):
    """Our server knows SGLang's calls. It answers with the tokens so far, and the rest is asked for again; or, with an
    update in flight, it continues and tells which weights produced which tokens."""
    sglang = ["rollout.backend=sglang", f"rollout.servers=[{servers[0].url}]"]
    version = 4
    for transfer, mode in ways:
        config = with_dtype(load_config(None, [*sglang, f"rollout.weight_transfer={transfer}"]).config)
        engine = make_fleet(BackendContext(config, MODEL, load_tokenizer(MODEL), Spans()))
        try:
            assert engine.status().needs_weights
            for num_tokens in (40, 160, 640, 1600):
                response = updated_while_generating(engine, servers[0], version, mode, num_tokens)
                if response.output_versions[-1] == version + 1:
                    break
                version += 2  # on a busy machine, it may end before the update
            assert response.output_versions[-1] == version + 1
            streamed = asyncio.run(follow(engine, 60))
            whole = generate(engine, 1, 60)[0]
            assert tuple(token for delta in streamed for token in delta.tokens) == whole.output_tokens
            assert len(streamed) > 2
            engine.sleep(("kv_cache",))
            engine.wake(("kv_cache",))
            assert generate(engine, 1, 3)[0].output_versions == (version + 1,) * 3
        finally:
            engine.close()
        version += 2
    with pytest.raises(RequestError, match="before truncation"):
        engine.check(ModelRequest("r", (5,), SamplingParams(max_new_tokens=2, top_k=3), rng_key=0))
    flush = urllib.request.Request(f"{servers[0].url}/flush_cache", method="POST")
    with urllib.request.urlopen(flush, timeout=LIMIT_S) as reply:
        assert reply.read() == b"Cache flushed.\n"


def updated_while_generating(
    engine: InferenceEngine, server: Running, version: int, mode: Any, num_tokens: int
) -> ModelResponse:
    """A response that begins under ``version``. The next one is published as soon as the server generates it."""
    engine.update_weights(update(version)).result(LIMIT_S)
    thread, results = in_background(lambda: generate(engine, 1, num_tokens))
    until(lambda: running_requests(server) > 0 or not thread.is_alive(), "it generates")
    engine.update_weights(update(version + 1, seed=1), mode).result(LIMIT_S)
    thread.join(LIMIT_S)
    response = results[0][0]
    assert len(response.output_tokens) == num_tokens
    assert sorted(response.output_versions) == list(response.output_versions)
    return response


async def follow(engine: InferenceEngine, count: int) -> list[Delta]:
    sampling = SamplingParams(max_new_tokens=count, ignore_end=True)
    return [delta async for delta in engine.astream(ModelRequest("r0", (5, 6, 7), sampling, rng_key=0))]


def running_requests(server: Running) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics.json", timeout=LIMIT_S) as reply:
        return int(json.load(reply)["num_running"])


@pytest.mark.slow
def test_a_killed_server_loses_nothing_and_is_used_again_when_it_is_back(tmp_path, caplog):
    one, two = Running(), Running()
    try:
        for each in (one, two):
            each.start()
        for each in (one, two):
            each.ready()

        def kill() -> None:
            two.kill()
            two.start()

        settings = [*SHORT, "rollout.max_new_tokens=48", "rollout.max_staleness=2", "trainer.total_steps=12"]
        with after_step(2, kill), after_step(10, lambda: two.ready() and None):
            train_here("quickstart", *settings, *named(one, two), f"run.root={tmp_path}")
    finally:
        for each in (one, two):
            each.kill()
    record = RunDirectory.open(tmp_path / "quickstart").read_ledger()[-1]
    assert record["counts"] == {"dispatched": 48, "trained": 48, "dropped": 0, "buffered": 0, "in_flight": 0}
    assert lags(tmp_path / "quickstart") <= {0, 1, 2}
    assert "its return is awaited" in caplog.text
    status = json.loads((tmp_path / "quickstart" / "status.json").read_text())
    assert status["engine_restarts"] >= 1
