"""``headwater servers``: servers join and leave a run while it trains."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import pyarrow.parquet as pq
import pytest
from command import (
    CUT_DOWN,
    ON_TWO_RANKS,
    ROOT,
    children,
    environment_of_ranks,
    headwater,
    metrics,
    start_headwater,
)
from held import waits_for
from running import Running

from headwater.observe.run_directory import RunDirectory
from headwater.observe.server_changes import read_changes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("live servers"), pytest.mark.timeout(1200)]

LIMIT_S = 600.0
SHORT = [*CUT_DOWN, "eval.before=false", "eval.after=false", "rollout.max_staleness=2", "rollout.max_new_tokens=24",
         "algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute"]  # fmt: skip


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Running]]:
    started = [Running("engine.deterministic=true").start() for _ in range(3)]
    try:
        yield [each.ready() for each in started]
    finally:
        for each in started:
            each.kill()


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (answer := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return answer


def named(*servers: Running, backend: str = "native") -> list[str]:
    return [f"rollout.backend={backend}", f"rollout.servers=[{', '.join(each.url for each in servers)}]"]


@contextmanager
def training(*arguments: object) -> Iterator[forked.Forked]:
    process = start_headwater(*arguments)
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)


def ended_well(process: forked.Forked) -> str:
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def step_of(run: Path) -> int:
    return max((each["step"] for each in metrics(run, "train")), default=0) if (run / "metrics.jsonl").exists() else 0


def train_to(process: forked.Forked, run: Path, step: int) -> None:
    until(lambda: step_of(run) >= step or process.poll() is not None, "it trains")
    assert process.poll() is None, process.communicate(timeout=LIMIT_S)


def change(run: Path, *arguments: object) -> list[dict[str, Any]]:
    told = headwater("servers", run, *arguments, "--json")
    assert told.code == 0, told.stderr
    return json.loads(told.stdout)["servers"]


def state_of(run: Path, name: str) -> str:
    return next(each["state"] for each in change(run) if each["name"] == name)


def measured(server: Running, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics.json", timeout=LIMIT_S) as reply:
        return json.load(reply).get(name, 0)


def check_run(run: Path, num_steps: int) -> None:
    """No group is lost or trained on twice, no episode has gone back to older weights, and no token was too old."""
    records = RunDirectory.open(run).read_ledger()
    count, counts = num_steps * 4, records[-1]["counts"]
    # On a busy machine a group may take so long that it is too old, and its prompt is drawn again.
    dropped = [each["kind"] for record in records for each in record["dropped"]]
    assert dropped == ["stale"] * counts["dropped"]
    assert counts == {**counts, "dispatched": count + len(dropped), "trained": count, "buffered": 0, "in_flight": 0}
    trained = [group["id"] for record in records for group in record["trained"]]
    assert len(set(trained)) == len(trained) == count
    for step in range(1, num_steps + 1):
        for row in pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist():
            made = [version for version in row["versions"] if version >= 0]
            assert made == sorted(made), "an episode went back to older weights"
    lags = [name for each in metrics(run, "train") for name, share in each.items() if "/lag_" in name and share]
    assert {int(name.rpartition("_")[2]) for name in lags} <= {0, 1, 2}, "older tokens are masked"


@pytest.mark.parametrize("ways", [
    ["rollout.weight_transfer=shared_memory"],
    ["rollout.weight_transfer=collective"],
    ["rollout.weight_transfer=file"],
    ["rollout.weight_transfer=collective", "rollout.update_order=rolling"],
], ids=["shared_memory", "collective", "file", "rolling"])  # fmt: skip
def test_servers_join_and_leave_a_run(servers, tmp_path, ways):
    first, second, third = servers
    run, go, num_steps = tmp_path / "quickstart", tmp_path / "go", 12
    settings = [*SHORT, f"trainer.total_steps={num_steps}", f"run.root={tmp_path}", "engine.deterministic=true", *ways]
    with training("train", "quickstart", *settings, *waits_for(go, run, 2), *named(first, second)) as process:
        train_to(process, run, 2)
        before = measured(third, "num_tokens_generated")
        assert [each["state"] for each in change(run)] == ["serving", "serving"]
        added = change(run, "add", third.url)
        assert [each["name"] for each in added] == [first.url, second.url, third.url]
        until(lambda: state_of(run, third.url) == "serving", "it gets the newest weights")
        for url in (third.url, third.url.replace("127.0.0.1", "localhost")):
            told = headwater("servers", run, "add", url)
            assert "is in the router already" in told.stderr
        go.touch()
        # It has the weights of a version, so all of its tokens have that version or a newer one.
        until(lambda: measured(third, "num_tokens_generated") > before, "it generates")
        until(lambda: third.url in headwater("doctor", run).stdout, "the status is written every two seconds")
        change(run, "remove", first.url, "--move")
        until(lambda: [each["name"] for each in change(run)] == [second.url, third.url], "it is removed")
        change(run, "drain", second.url)
        told = headwater("servers", run, "remove", third.url)
        assert "is the last server that can serve" in told.stderr
        at = step_of(run)
        until(lambda: step_of(run) > at + 1 or process.poll() is not None, "the new server trains the run alone")
        change(run, "undrain", second.url)
        out = ended_well(process)
    assert "Traceback" not in out
    assert not (run / "servers.sock").exists()
    check_run(run, num_steps)
    kinds = [each.kind for each in read_changes(run / "servers.jsonl")]
    assert kinds == ["start", "add", "remove", "drain", "undrain"]
    status = json.loads((run / "status.json").read_text())
    assert [each["url"] for each in status["servers"]] == [second.url, third.url]
    assert {each["version"] for each in status["servers"]} == {num_steps}
    told = headwater("servers", run)
    assert told.code != 0
    assert "is not running" in told.stderr
    with urllib.request.urlopen(f"{first.url}/health", timeout=LIMIT_S) as reply:
        assert reply.status == 200, "a server of others keeps running"
    # Every token and log-prob is that of the version it is said to have, whichever server generated it.
    told = headwater("replay", run)
    assert f"The weights of all {num_steps} steps equal the recorded ones, bit for bit" in told.stdout, told.stderr


def test_a_server_joins_a_run_that_publishes_adapters_alone(tmp_path):
    """It first gets the weights below the adapters, then the adapters alone as the others do."""
    run, go, num_steps = tmp_path / "quickstart", tmp_path / "go", 12
    lora = ["lora.rank=4", "lora.alpha=8", "rollout.publish=adapter", "rollout.weight_transfer=collective"]
    settings = [*SHORT, *lora, f"trainer.total_steps={num_steps}", f"run.root={tmp_path}"]
    started = [Running("engine.adapter_rank=4", "engine.adapter_alpha=8").start() for _ in range(3)]
    bare = Running().start()
    try:
        first, second, third = [each.ready() for each in started]
        with training("train", "quickstart", *settings, *waits_for(go, run, 2), *named(first, second)) as process:
            train_to(process, run, 2)
            before = measured(third, "num_tokens_generated")
            change(run, "add", third.url)
            until(lambda: state_of(run, third.url) == "serving", "it gets the newest weights")
            told = headwater("servers", run, "add", bare.ready().url)
            assert "engine.adapter_rank=4" in told.stderr, "it has no adapters"
            go.touch()
            ended_well(process)
        assert measured(third, "num_tokens_generated") > before, "groups that are drawn later go to it, too"
    finally:
        for each in (*started, bare):
            each.kill()
    check_run(run, num_steps)
    status = json.loads((run / "status.json").read_text())
    assert [each["version"] for each in status["servers"]] == [num_steps] * 3
    alone = [each["weights/bytes"] for each in metrics(run, "train")]
    assert alone[-1] < 1e6, "only the adapters, of a model of 3.4 MB"


def test_a_server_of_another_kind_joins_a_run_on_two_ranks(servers, tmp_path):
    """Over SGLang's calls, which ``headwater serve`` answers too. Rank 0 has the router."""
    first, second, third = servers
    run, go = tmp_path / "quickstart", tmp_path / "go"
    settings = [*SHORT, "trainer.total_steps=6", f"run.root={tmp_path}", *waits_for(go, run, 2)]
    command = ["-c", ON_TWO_RANKS, "train", "quickstart", *settings, *named(first, second, backend="sglang")]
    process = forked.popen(
        *command, cwd=ROOT, env=environment_of_ranks(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        train_to(process, run, 2)
        before = measured(third, "num_tokens_generated")
        change(run, "add", third.url)
        until(lambda: state_of(run, third.url) == "serving", "it gets the newest weights")
        change(run, "remove", second.url)
        go.touch()
        _, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait(LIMIT_S)
    assert json.loads((run / "status.json").read_text())["state"] == "finished", err[-3000:]
    assert measured(third, "num_tokens_generated") > before
    check_run(run, 6)


@pytest.mark.parametrize("transfer", ["shared_memory", "collective"])
def test_a_server_that_cannot_be_used_does_not_harm_the_run(servers, tmp_path, transfer):
    """Another model with the same vocabulary is found out when it refuses the weights."""
    first, second, _ = servers
    run, go = tmp_path / "quickstart", tmp_path / "go"
    other, narrow = Running(model="tiny:llama").start(), Running("--dtype", "bfloat16").start()
    settings = [*SHORT, "trainer.total_steps=6", f"run.root={tmp_path}", f"rollout.weight_transfer={transfer}"]
    try:
        with training("train", "quickstart", *settings, *waits_for(go, run, 2), *named(first, second)) as process:
            train_to(process, run, 2)
            change(run, "add", other.ready().url)
            until(lambda: "refused" in state_of(run, other.url), "it refuses the weights")
            told = headwater("servers", run, "add", narrow.ready().url)
            assert "its number type is bfloat16" in told.stderr
            go.touch()
            ended_well(process)
    finally:
        other.kill()
        narrow.kill()
    check_run(run, 6)
    status = json.loads((run / "status.json").read_text())
    assert [each["version"] for each in status["servers"][:2]] == [6, 6]
    assert measured(first, "num_tokens_generated") > 0


def test_a_killed_run_leaves_a_socket_that_the_next_part_replaces(servers, tmp_path):
    first, second, third = servers
    run, go = tmp_path / "quickstart", tmp_path / "go"
    settings = [*SHORT, "trainer.total_steps=6", "trainer.checkpoint_every_steps=1", f"run.root={tmp_path}"]
    with training("train", "quickstart", *settings, *waits_for(go, run, 2), *named(first, second)) as process:
        train_to(process, run, 2)
        change(run, "add", third.url)
        until(lambda: RunDirectory.open(run).checkpoint_steps(), "a checkpoint is written")
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
    assert (run / "servers.sock").is_socket()
    told = headwater("servers", run)
    assert told.code != 0
    assert "is not running" in told.stderr
    with training("train", "--resume", run) as process:
        until(lambda: headwater("servers", run).code == 0 or process.poll() is not None, "it takes calls again")
        assert [each["name"] for each in change(run)] == [first.url, second.url]
        go.touch()
        out = ended_well(process)
    assert f"Servers were changed while {run} ran before: {third.url} added" in out
    assert not (run / "servers.sock").exists()
    assert RunDirectory.open(run).read_ledger()[-1]["counts"]["trained"] == 24


def test_a_server_that_the_run_has_started_ends_when_it_is_removed(servers, tmp_path):
    run, go = tmp_path / "quickstart", tmp_path / "go"
    launched = ["rollout.placement=disaggregated", "rollout.launch.num_servers=2"]
    settings = [*SHORT, "trainer.total_steps=6", f"run.root={tmp_path}", *launched]
    with training("train", "quickstart", *settings, *waits_for(go, run, 2)) as process:
        train_to(process, run, 2)
        pid = json.loads((run / "status.json").read_text())["pid"]
        assert len(children(pid)) == 2
        change(run, "add", servers[0].url)
        until(lambda: state_of(run, servers[0].url) == "serving", "it gets the newest weights")
        assert len(change(run, "remove", "server", "0", "--move")) == 2
        until(lambda: len(children(pid)) == 1, "its process ends")
        go.touch()
        ended_well(process)
    check_run(run, 6)
