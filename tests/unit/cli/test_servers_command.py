"""``headwater servers`` on a real socket: what it shows, what it refuses, and who may use it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from backends.router.scripted import ScriptedEngine
from backends.router.test_router_engine import FAST
from ports import free_port

from headwater.backends import BackendContext, fleet
from headwater.backends.fleet import _reach, connect_server
from headwater.backends.router.engine import RoutedServer, RouterEngine, RouterOptions
from headwater.backends.router.run_calls import RunCalls
from headwater.backends.vllm.engine import VllmEngine
from headwater.cli.main import main
from headwater.config.explain import to_yaml
from headwater.config.load import load_config
from headwater.core.errors import ConfigError, RolloutFailed
from headwater.observe.run_directory import RunDirectory
from headwater.observe.run_lock import RunLock
from headwater.observe.run_socket import CallRefused, NothingListens, call
from headwater.observe.server_changes import Difference, ServerChange, read_changes
from headwater.observe.spans import Spans

A, B, C = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))
NAMED = ["rollout.backend=native", f"rollout.servers=[{A}, {B}]"]


def run_in(folder: Path, *settings: str) -> RunDirectory:
    run = RunDirectory.create(folder, "run")
    run.write_config(to_yaml(load_config(None, settings).config))
    return run


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return run_in(tmp_path, *NAMED)


@pytest.fixture
def router() -> Iterator[RouterEngine]:
    made = RouterEngine(
        [RoutedServer(url, ScriptedEngine()) for url in (A, B)],
        RouterOptions(health_every_s=FAST.health_every_s, keeps_one=True),
    )
    yield made
    made.close()


def connect(url: str) -> RoutedServer:
    if url != C:
        raise ConfigError([f"{url} serves another model"])
    return RoutedServer(url, ScriptedEngine())


def servers(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["servers", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_servers_of_a_run_are_listed_and_changed(run, router, capsys):
    with RunLock(run.lock_file), RunCalls(run, router, connect):
        code, out, _ = servers(capsys, run.path)
        assert code == 0
        assert out.splitlines() == [
            "2 servers, policy version 0, 0 requests wait for a server",
            f"  {A}  version 0, 0 running, 0 waiting; serving",
            f"  {B}  version 0, 0 running, 0 waiting; serving",
        ]
        assert servers(capsys, run.path, "drain", f"{A}/")[0] == 0
        assert router.status().servers[0].state == "drained"
        assert servers(capsys, run.path, "undrain", A)[0] == 0
        code, out, _ = servers(capsys, run.path, "add", C)
        assert code == 0
        assert f"{C} added. A resumed run starts with the servers of its recipe again." in out
        code, out, _ = servers(capsys, run.path, "drain", C, "--json")
        json.loads(out)
        code, out, err = servers(capsys, run.path, "remove", C, "--json")
        json.loads(out)
        assert f"Waiting until the requests of {C} have ended" in err
        assert servers(capsys, run.path, "add", C)[0] == 0
        code, out, _ = servers(capsys, run.path, "remove", A, "--move")
        assert code == 0
        assert f"Changed while the run runs: {C} added and {A} removed." in out
        assert f"resume it with 'rollout.servers=[{B}, {C}]'" in out
        code, out, _ = servers(capsys, run.path, "--json")
        assert [each["name"] for each in json.loads(out)["servers"]] == [B, C]
    kinds = [(each.kind, each.servers) for each in read_changes(run.servers_file)]
    assert kinds == [
        ("start", (A, B)), ("drain", (A,)), ("undrain", (A,)), ("add", (C,)),
        ("drain", (C,)), ("remove", (C,)), ("add", (C,)), ("remove", (A,)),
    ]  # fmt: skip


def test_two_calls_that_add_one_server_at_the_same_time_connect_to_it_once(run, router):
    may_connect, connecting = threading.Event(), threading.Event()

    def slow(url: str) -> RoutedServer:
        connecting.set()
        may_connect.wait(60)
        return connect(url)

    def add() -> dict:
        return call(run.servers_socket, "/servers", {"url": C}, limit_s=60)

    with RunCalls(run, router, slow), ThreadPoolExecutor() as threads:
        first = threads.submit(add)
        assert connecting.wait(60)
        try:
            with pytest.raises(CallRefused, match="is in the router already"):
                add()
        finally:
            may_connect.set()
        assert len(first.result(60)["servers"]) == 3
        with pytest.raises(CallRefused, match="is in the router already"):
            add()


def test_one_server_with_two_addresses_is_refused(run, router):
    def same(url: str) -> RoutedServer:
        engine = ScriptedEngine()
        engine.instance = "one process"
        return RoutedServer(url, engine)

    with RunCalls(run, router, same):
        call(run.servers_socket, "/servers", {"url": C}, limit_s=60)
        with pytest.raises(CallRefused, match=f"http://localhost:3: is in the router already, as {C}"):
            call(run.servers_socket, "/servers", {"url": "http://localhost:3"}, limit_s=60)
    assert router.names == (A, B, C)


def test_a_file_system_that_fails_at_the_end_does_not_fail_the_run(run, router, monkeypatch, caplog):
    def fails(*_, **__):
        raise OSError("stale file handle")

    with RunCalls(run, router, connect):
        monkeypatch.setattr(Path, "unlink", fails)
    assert "stale file handle" in caplog.text
    calls = RunCalls(run, router, connect)
    with calls:  # no socket can be made, because the old one cannot be removed
        pass
    assert "no socket can be made" in caplog.text
    assert calls._loop.is_closed()


def test_what_cannot_be_done_is_refused_with_a_reason(run, router, capsys):
    with RunLock(run.lock_file), RunCalls(run, router, connect):
        for arguments, message in (
            (["drain", "server 7"], f"name: server 'server 7' is not in the router; its servers are {A}, {B}"),
            (["add", "10.0.0.7:8000"], "url: must be an address such as http://127.0.0.1:8001"),
            (["add", A], "is in the router already"),
            (["add", "http://127.0.0.1:9"], "http://127.0.0.1:9 serves another model"),
            (["add"], "add: name the address of a running server"),
            (["remove"], "remove: name a server"),
            (["undrain", A, "--move"], "--move goes with drain and remove"),
        ):
            code, _, err = servers(capsys, run.path, *arguments)
            assert code == 2
            assert message in err
        assert servers(capsys, run.path, "drain", A)[0] == 0
        code, _, err = servers(capsys, run.path, "remove", B)
        assert code == 2
        assert f"{B}: is the last server that can serve ({A}: drained" in err
        with pytest.raises(SystemExit):
            main(["servers", str(run.path), "restart", A])
    assert Difference.of(read_changes(run.servers_file)) == Difference()


def test_a_run_that_does_not_run_or_has_no_router_says_so(run, router, tmp_path, capsys):
    code, _, err = servers(capsys, run.path)
    assert code == 2
    assert f"{run.path}: is not running" in err
    assert "starts with the servers of its recipe" in err
    with RunLock(run.lock_file):
        assert "is starting or ending" in servers(capsys, run.path)[2]
    for name, settings, message in (
        ("one", ["rollout.backend=native", f"rollout.servers=[{A}]"], "has a single server, without the router"),
        ("none", [], "generates in its own process (rollout.placement = colocated)"),
        ("child", ["rollout.placement=disaggregated"], "has a single server"),
    ):
        (tmp_path / name).mkdir()
        alone = run_in(tmp_path / name, *settings)
        with RunLock(alone.lock_file):
            code, _, err = servers(capsys, alone.path)
        assert code == 2
        assert message in err
        assert "name at least two running servers in rollout.servers" in err
    assert "not a run directory" in servers(capsys, tmp_path)[2]


def test_a_run_of_another_machine_is_named(run, router, capsys):
    with RunLock(run.lock_file):
        holder = json.loads(run.lock_file.read_text())
    run.lock_file.write_text(json.dumps({**(holder or {}), "boot": "another", "host": "elsewhere"}))
    assert "on elsewhere" in servers(capsys, run.path)[2]


def test_only_the_user_of_the_run_may_connect(run, router, tmp_path):
    with RunCalls(run, router, connect):
        mode = run.servers_socket.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        if os.geteuid() == 0:  # otherwise no other user can be tried
            tmp_path.chmod(0o755)
            code = (
                "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
                "try: socket.socket(socket.AF_UNIX).connect(os.path.basename(sys.argv[1]))\n"
                "except PermissionError: print('refused')"
            )
            done = subprocess.run(
                [sys.executable, "-I", "-c", code, run.servers_socket],
                cwd=run.path, capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip
            assert done.stdout == "refused\n", done.stderr
    assert not run.servers_socket.exists()


def test_a_socket_of_a_killed_run_is_noticed_and_replaced(run, router, capsys):
    left = subprocess.run(
        [sys.executable, "-c", "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])", "servers.sock"],
        cwd=run.path, check=True, timeout=120,
    )  # fmt: skip
    assert left.returncode == 0
    with pytest.raises(NothingListens) as stale:
        call(run.servers_socket, "/servers", limit_s=60)
    assert stale.value.is_stale
    assert "is not running" in servers(capsys, run.path)[2]
    with RunLock(run.lock_file), RunCalls(run, router, connect):
        assert servers(capsys, run.path)[0] == 0


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux")
def test_the_directory_of_a_run_may_have_a_long_name(tmp_path, router, capsys):
    folder = tmp_path
    for _ in range(4):
        folder = folder / ("long" * 12)
    folder.mkdir(parents=True)
    run = run_in(folder, *NAMED)
    assert len(os.fsencode(run.servers_socket)) > 200
    with RunLock(run.lock_file), RunCalls(run, router, connect):
        assert stat.S_IMODE(run.servers_socket.stat().st_mode) == 0o600
        assert servers(capsys, run.path)[0] == 0
    assert not run.servers_socket.exists()


def test_a_folder_without_sockets_does_not_end_the_run(run, router, caplog):
    run.servers_socket.mkdir()  # bind fails as on a file system without sockets
    with RunCalls(run, router, connect):
        pass
    assert "no socket can be made there" in caplog.text


def test_a_server_that_cannot_join_is_refused_before_it_is_waited_for():
    config = load_config(None, [*NAMED, "rollout.weight_transfer=shared_memory"]).config
    context = BackendContext(config, "tiny:qwen3", None, Spans())
    with pytest.raises(RolloutFailed, match=r"127\.0\.0\.1:\d+ cannot be reached.*start it first"):
        connect_server(context, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"shared_memory: http://10\.1\.2\.3:8000 is not on this"):
        connect_server(context, "http://10.1.2.3:8000")


def test_a_vllm_server_that_joins_chooses_its_transfer_as_those_of_the_recipe(monkeypatch):
    """Each of them may take weights in another way, for example from files because it has none of our methods."""
    config = load_config(None, ["rollout.backend=vllm", f"rollout.servers=[{A}, {B}]"]).config
    contexts: list[BackendContext] = []
    monkeypatch.setattr(fleet, "_reach", lambda url: None)
    monkeypatch.setattr(VllmEngine, "connect", lambda url, context: contexts.append(context))
    connect_server(BackendContext(config, "tiny:qwen3", None, Spans()), C)
    assert [each.config.rollout.weight_transfer for each in contexts] == ["auto"]
    adapters = load_config(None, ["rollout.backend=vllm", "lora.rank=4", "rollout.publish=adapter"]).config
    with pytest.raises(ConfigError, match=r"file: .* set rollout\.weight_folder"):
        connect_server(BackendContext(adapters, "tiny:qwen3", None, Spans()), "http://10.1.2.3:8000")


def test_changes_of_an_earlier_part_of_the_run_do_not_count(run):
    for kind, names in (("start", [A, B]), ("add", [C]), ("start", [A, B]), ("remove", [A])):
        run.append_server_change(ServerChange.now(kind, 3, names).to_json())
    with run.servers_file.open("a") as file:
        file.write('{"kind": "add", "ti')  # a process was killed while writing
    run.append_server_change(ServerChange.now("add", 4, [C]).to_json())
    assert str(Difference.of(read_changes(run.servers_file))) == f"{C} added and {A} removed"


def test_the_key_of_the_servers_does_not_follow_a_redirect(monkeypatch):
    asked: list[tuple[str, str | None]] = []

    class Redirects(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
            self.end_headers()

    monkeypatch.setenv("HEADWATER_SERVER_KEY", "secret")
    with HTTPServer(("127.0.0.1", 0), Redirects) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _reach(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert asked == [("/v1/models", "Bearer secret")]
