"""Who may ask, what cannot be reached, and that text stays text."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from dashboard.parts import SCRIPT, make_run, page, served
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.cli import ui
from headwater.cli.main import main
from headwater.dashboard.assets import Assets
from headwater.dashboard.guard import Access, guard
from headwater.dashboard.plain_values import encoded
from headwater.observe.run_directory import RunDirectory


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1:{port}.evil.example"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_other_sites_are_refused(client, headers):
    filled = {name: value.replace("{port}", str(client.port)) for name, value in headers.items()}
    reply, body = client.raw("/api/runs", filled)
    assert reply.status == 403
    assert json.loads(body)["error"]["code"] == "forbidden"


def test_the_page_itself_is_accepted_and_confined(client):
    own = {"Origin": f"http://127.0.0.1:{client.port}", "Sec-Fetch-Site": "same-origin"}
    assert client.raw("/api/runs", own)[0].status == 200
    reply, body = client.raw("/", {"Host": f"localhost:{client.port}"})
    assert reply.status == 200
    assert b"<html" in body
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert client.raw("/runs/first", {})[0].status == 200, "addresses within the page"
    assert client.raw("/api/runs", method="POST")[0].status == 405
    assert client.raw("/api/runs", method="HEAD")[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../app.py", "/assets/%2e%2e/app.py", "/assets/..%2fapp.py", "/../../etc/passwd",
        "/assets//etc/passwd",
        "/api/runs/..", "/api/runs/%2e%2e", "/api/runs/..%2ffirst", "/api/runs/no%20run", "/api/runs/file.txt",
        "/api/runs/first/..%2fconfig.yaml", "/api/runs/first/rollout?id=../../etc/passwd:0", "/api/nothing",
        "/api/runs/first/rollout?id=step_..:0", "/api/runs/first/nothing", "/api/runs/%00", "/config.yaml",
        "/api/runs/",
    ],
)  # fmt: skip
def test_nothing_but_runs_and_the_page_can_be_reached(client, path):
    reply, body = client.raw(path)
    is_page = body == page().files["index.html"].content
    assert reply.status in (400, 404) or is_page, (path, reply.status, body[:200])
    assert is_page == (path == "/../../etc/passwd"), "an address within the page, which shows that it is unknown"
    assert b"root:" not in body
    assert b"import" not in body


def test_a_token_is_needed_where_there_is_one(runs_dir):
    with served(runs_dir, token="secret-1") as client:
        assert client.error("/runs", 401)[0] == "unauthorized"
        assert client.raw("/")[0].status == 401
        assert client.raw("/?token=wrong")[0].status == 401
        assert client.raw("/?token=secret-1", {"Host": "evil.example"})[0].status == 401
        reply, _ = client.raw("/runs/first?token=secret-1&x=1")
        assert (reply.status, reply.headers["Location"]) == (303, "/runs/first?x=1")
        cookie = reply.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert client.raw("/api/runs", {"Cookie": cookie.partition(";")[0]})[0].status == 200
        assert client.raw("/api/runs", {"Cookie": cookie.partition("=")[0] + "=x"})[0].status == 401


def test_the_token_is_not_on_any_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(ui.TOKEN, raising=False)
    assert main(["ui", str(tmp_path), "--token", "secret-123", "--no-browser"]) == 2
    assert "secret-123" not in capsys.readouterr().err
    monkeypatch.setenv(ui.TOKEN, "short")
    assert main(["ui", str(tmp_path), "--no-browser"]) == 2
    assert ui.TOKEN in capsys.readouterr().err
    monkeypatch.setenv(ui.TOKEN, "secret-123")
    assert ui._token("") == ui._token("auto") == "secret-123"
    address = ui.redirect("http://127.0.0.1:7474/?token=secret-123&x=1", str(tmp_path))
    file = Path(address.removeprefix("file://"))
    assert "secret" not in address
    assert file.stat().st_mode & 0o777 == 0o600
    assert "url=http://127.0.0.1:7474/?token=secret-123&amp;x=1" in file.read_text()


def test_a_wrong_port_of_a_tunnel_is_explained(client):
    body = client.raw("/", {"Host": "localhost:9999"})[1].decode()
    assert f"ssh -L {client.port}:127.0.0.1:{client.port}" in body


def test_a_busy_server_does_not_end_the_events(tmp_path):
    """After the first event, no error answer can be sent: it is tried again."""
    from headwater.dashboard.errors import Refused
    from headwater.dashboard.events import STOPPING, stream
    from headwater.dashboard.runs import Place, Runs

    make_run(tmp_path, num_steps=1)
    runs, called = Runs(Place.of(tmp_path)), []

    async def call(work, *args):
        called.append(work)
        if len(called) == 2:
            raise Refused(503, "busy", "Too many.")
        if len(called) == 3:
            raise ZeroDivisionError
        return work(*args)

    async def check() -> None:
        app = web.Application(middlewares=[guard(Access.of("127.0.0.1", 1))])
        app[STOPPING] = asyncio.Event()
        app.router.add_get("/events", lambda request: stream(request, runs, None, call, lambda run: {}))
        async with TestClient(TestServer(app)) as client:
            reply = await client.get("/events", headers={"Host": "127.0.0.1:1"})
            assert await reply.text() == "event: hello\ndata: {}\n\n"

    asyncio.run(check())
    assert len(called) == 3


def test_scripts_in_texts_stay_texts(client):
    reply, body = client.raw("/api/runs/first/rollout?id=step_000001:5")
    assert reply.headers["Content-Type"].startswith("application/json")
    assert SCRIPT in json.loads(body)["response"]
    reply, body = client.raw("/api/runs/first/export?id=step_000001:5")
    html = body.decode()
    assert "attachment" in reply.headers["Content-Disposition"]
    assert SCRIPT not in html
    data = re.search(r'<script type="application/json" id="headwater-data">(.*?)</script>', html, re.DOTALL)
    assert SCRIPT in json.loads(data[1])["/api/runs/first/rollout?id=step_000001:5"]["response"]
    assert encoded({"x": "\ud800"}) == b'{"x":"\\ud800"}'


def test_an_export_has_the_answers_of_the_server(client, runs_dir, tmp_path, capsys):
    file = tmp_path / "pages" / "run.html"
    assert main(["ui", str(runs_dir / "first"), "--export", str(file)]) == 0
    assert "open it in any browser" in capsys.readouterr().out
    html = file.read_text()
    data = json.loads(re.search(r'id="headwater-data">(.*?)</script>', html, re.DOTALL)[1])
    assert data["/api/info"]["is_export"] is True
    for path in ("/runs/first/keys", "/runs/first/stages", "/runs/first/metrics?keys=reward/mean",
                 "/runs/first/metrics?keys=reward/mean&kind=eval", "/runs/first/rollouts?step=3",
                 "/runs/first/groups?step=3", "/runs/first/tokens?id=step_000003:4", "/runs/first/steps?source=eval",
                 "/runs/first/group?step=3&uid=row/1"):  # fmt: skip
        assert data[f"/api{path}"] == client.get(path) or "index" in data[f"/api{path}"], path
    assert str(runs_dir) not in re.sub(r'"run":"[^"]*"', "", html), "nobody needs to know where the run was"
    assert 'src="' not in html.partition("headwater-data")[0].replace('src="data:', "")
    assert main(["ui", str(runs_dir), "--export", str(file)]) == 2
    assert main(["ui", str(runs_dir / "first"), "--export", str(file), "--rollout", "step_000099:1"]) == 2
    assert "no rollout file" in capsys.readouterr().err
    assert main(["ui", str(tmp_path / "nowhere")]) == 2


def test_events_tell_what_changed_and_what_is_gone(tmp_path):
    from dashboard.parts import add_metrics

    run = make_run(tmp_path)
    with served(tmp_path) as client:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=300)
        connection.request("GET", "/api/runs/first/events")
        stream = connection.getresponse()
        seen = []

        def read() -> None:
            while line := stream.readline():
                if line.startswith(b"event: "):
                    seen.append((line[7:].strip().decode(), json.loads(stream.readline()[6:])))

        reader = threading.Thread(target=read)
        reader.start()
        _until(lambda: seen)
        assert seen.pop(0) == ("hello", {})
        add_metrics(run, 4)
        _until(lambda: seen)
        event, content = seen.pop(0)
        assert (event, content["runs"], content["parts"], content["state"]) == (
            "changed",
            ["first"],
            ["metrics"],
            "finished",
        )
        shutil.rmtree(run.path)
        _until(lambda: ("gone", {"run": "first"}) in seen)
        reader.join(300)
        assert not reader.is_alive(), "nothing more to say"
        connection.close()
        assert client.error("/runs/first/events", 404)[0] == "unknown_run"


def _until(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_package_without_its_page_says_what_to_do(tmp_path):
    from headwater.core.errors import HeadwaterError

    with pytest.raises(HeadwaterError, match="npm run build"):
        Assets(tmp_path)


FILES = ("config.yaml", "metrics.jsonl", "ledger.jsonl", "status.json", "trace.json", "tokens.parquet",
         "rollouts/step_000001.parquet", "eval/step_000002.parquet", "run_id")  # fmt: skip
ANSWERS = ("", "/config", "/keys", "/metrics?keys=reward/mean", "/staleness", "/stages", "/ledger", "/doctor",
           "/timeline", "/engine", "/steps", "/rollouts", "/rollouts?step=1", "/groups?step=1",
           "/rollout?id=step_000001:0", "/tokens?id=step_000001:0", "/export")  # fmt: skip


@settings(max_examples=6)
@given(st.data())
def test_damaged_directories_get_answers(runs_dir, tmp_path_factory, data):
    """Whatever is in the files: an answer, or one sentence that says what is wrong. Never an error of ours."""
    root = tmp_path_factory.mktemp("fuzzed")
    run = RunDirectory(Path(shutil.copytree(runs_dir / "first", root / "first")))
    for name in data.draw(st.lists(st.sampled_from(FILES), min_size=1, max_size=4, unique=True)):
        path = run.path / name
        before = path.read_bytes() if path.exists() else b""
        how = data.draw(st.sampled_from(["cut", "empty", "gone", "noise", "folder", "changed", "json"]))
        path.unlink(missing_ok=True)
        if how == "folder":
            path.mkdir()
        elif how != "gone":
            place = data.draw(st.integers(0, max(0, len(before) - 1)))
            contents = {
                "cut": before[:place],
                "empty": b"",
                "noise": data.draw(st.binary(max_size=200)),
                "changed": before[:place] + data.draw(st.binary(min_size=1, max_size=4)) + before[place + 4 :],
                "json": json.dumps(data.draw(_JSON)).encode(),
            }
            path.write_bytes(contents[how])
    with served(root, assets=page()) as client:
        client.get("/runs")
        for path in ANSWERS:
            reply, body = client.raw(f"/api/runs/first{path}")
            assert reply.status in (200, 404, 422), (path, reply.status, body[:300])
            if reply.status != 200:
                assert json.loads(body)["error"]["message"].endswith(".")


_NAMES = st.sampled_from(["kind", "step", "time", "state", "ledger", "log", "engine", "traceEvents"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=8,
)
