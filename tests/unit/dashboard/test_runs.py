"""The listing of runs, and what is said about one."""

from __future__ import annotations

import asyncio
import json

import pyarrow.parquet as pq
import pytest
from aiohttp import web
from dashboard.parts import COUNTS, add_metrics, make_run, served

from headwater.dashboard import metric_texts
from headwater.dashboard.engine_view import server_states


def test_runs_are_listed_with_what_matters(client):
    rows = {row["name"]: row for row in client.get("/runs")["runs"]}
    assert set(rows) == {"first", "sec ond-2"}
    first = rows["first"]
    assert (first["state"], first["step"], first["total_steps"]) == ("finished", 3, 3)
    assert (first["reward"], first["eval_reward"], first["tokens_per_s"]) == (0.3, 0.9, 100.0)
    assert first["staleness"] == 0.5, "a quarter of the tokens is two versions old"
    assert first["reward_history"] == [0.1, 0.2, 0.3]
    assert (first["model"], first["data"], first["has_rollouts"]) == ("tiny:qwen3", "largest_digit", True)


def test_the_summary_of_a_run(client):
    run = client.get("/runs/first")
    assert (run["num_train"], run["num_eval"], run["version"]) == (3, 1, 3)
    assert run["files"]["rollouts"] == 3
    assert run["files"]["eval"] == 1
    (reward,) = (each for each in run["summary"] if each["key"] == "reward/mean")
    assert (reward["first"], reward["last"], reward["best"]) == (0.1, 0.3, 0.3)
    assert client.get("/runs/sec%20ond-2")["step"] == 2


def test_settings_have_explanations_and_can_be_compared(client):
    sections = {each["name"]: each["settings"] for each in client.get("/runs/first/config")["sections"]}
    (steps,) = (each for each in sections["trainer"] if each["key"] == "trainer.total_steps")
    assert steps["value"] == 3
    assert steps["text"].startswith("Training steps of the run")
    assert not steps["is_default"]
    difference = client.get("/diff", left="first", right="sec ond-2")
    assert {each["key"]: (each["left"], each["right"]) for each in difference["differences"]} == {
        "trainer.total_steps": (3, 2),
        "learner.learning_rate": (2e-4, 0.5),
    }
    assert difference["num_equal"] > 100
    assert client.error("/diff", 404, left="first", right="third")[0] == "unknown_run"


def test_the_ledger_adds_up(client):
    ledger = client.get("/runs/first/ledger")
    assert {name: ledger[name] for name in COUNTS} == COUNTS
    assert {each["kind"]: each["count"] for each in ledger["drops"]} == {"stale": 1, "filtered": 1}
    assert all(each["text"] for each in ledger["drops"])
    assert (ledger["missing"], ledger["balanced"]) == (0, True)


@pytest.mark.parametrize(
    ("dispatched", "drops"), [(12, {"stale": 1}), (15, {}), (12, {"stale": 9}), (12, {"stale": 1, "filtered": 1})]
)
def test_the_ledger_adds_up_whatever_the_status_says(tmp_path, dispatched, drops):
    run = make_run(tmp_path, num_steps=1)
    text = run.status_file.read_text().replace('"dispatched": 12', f'"dispatched": {dispatched}')
    for kind in ("stale", "filtered"):
        text = text.replace(f'"{kind}": {{\n   "count": 1', f'"{kind}": {{\n   "count": {drops.get(kind, 0)}')
    run.status_file.write_text(text)
    with served(tmp_path) as client:
        ledger = client.get("/runs/first/ledger")
        parts = ledger["trained"] + ledger["buffered"] + ledger["in_flight"] + ledger["missing"]
        assert ledger["dispatched"] == dispatched == parts + sum(each["count"] for each in ledger["drops"])
        assert sum(each["count"] for each in ledger["drops"]) == ledger["dropped"]
        is_whole = drops == {"stale": 1, "filtered": 1}
        assert ledger["problems"] == [] if is_whole else "although the run is over" in ledger["problems"][0]
        run.status_file.unlink()
        ledger = client.get("/runs/first/ledger")
        assert ledger["source"] == "ledger.jsonl"
        assert [(each["kind"], each["count"]) for each in ledger["drops"]] == [("stale", 1), ("reason not recorded", 1)]


def test_the_doctors_findings_and_the_engine(client):
    doctor = client.get("/runs/first/doctor")
    assert doctor["life"]["state"] == "finished"
    assert doctor["is_healthy"] is True
    engine = client.get("/runs/first/engine")
    assert engine["engine"]["kv_used"] == 0.4
    assert (engine["engine"]["num_running"], engine["is_live"]) == (3, False)


def test_every_curve_of_the_engine_that_is_drawn_is_sent(tmp_path):
    """The page draws ``charts``, and the trainer records their keys."""
    documented = {key for kind, _, key, _ in json.loads(metric_texts.FILE.read_text()) if kind == "train"}
    run = make_run(tmp_path, num_steps=1)
    with served(tmp_path) as client:
        drawn = [key for chart in client.get("/runs/first/engine")["charts"] for key in chart["keys"]]
        assert set(drawn) <= documented
        add_metrics(run, 2, **dict.fromkeys(drawn, 1.0))
        assert list(client.get("/runs/first/engine")["history"]["series"]) == drawn
        assert {key for key in documented if key.startswith("engine/")} <= set(drawn)


def test_the_state_of_running_servers(monkeypatch):
    """A server that answers as ``headwater serve`` does, and one that is not there."""
    monkeypatch.setattr("headwater.dashboard.engine_view._LIMIT_S", 60.0)

    async def check() -> None:
        app = web.Application()
        numbers = {"version": 4, "num_running": 2, "num_waiting": 0, "kv_pages_total": 8, "kv_pages_used": 2}
        app.router.add_get("/metrics.json", lambda request: _slowly(request, numbers))
        app.router.add_get("/v1/models", lambda request: _json({"data": [{"id": "tiny"}]}))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        alive, gone = (await server_states([f"http://127.0.0.1:{port}", "http://127.0.0.1:9"], ""))["servers"]
        assert (alive["version"], alive["model"], alive["kv_used"], alive["num_running"]) == (4, "tiny", 0.25, 2)
        assert (gone["is_alive"], gone["version"]) == (False, None)
        assert gone["error"]
        await runner.cleanup()

    asyncio.run(check())


async def _slowly(request, content):
    """In pieces that arrive one after the other, as a long answer does."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    text = json.dumps(content | {f"n{number}": number for number in range(20_000)}).encode()
    for begin in range(0, len(text), 1 << 16):
        await answer.write(text[begin : begin + (1 << 16)])
        await asyncio.sleep(0.01)
    return answer


async def _json(content):
    return web.json_response(content)


def test_a_single_run_is_shown_alone(runs_dir):
    with served(runs_dir / "first") as client:
        assert client.get("/info")["single_run"] == "first"
        assert [row["name"] for row in client.get("/runs")["runs"]] == ["first"]
        assert client.error("/runs/sec%20ond-2", 404)[0] == "unknown_run"


def test_a_live_run_is_followed_and_a_deleted_one_reported(tmp_path):
    run = make_run(tmp_path)
    with served(tmp_path) as client:
        before = client.get("/runs/first/metrics", keys="reward/mean")
        assert before["steps"] == [1, 2, 3]
        with run.metrics_file.open("a") as file:
            file.write('{"kind": "train", "step": 4, "ti')  # is being written
        assert client.get("/runs/first/metrics", keys="reward/mean")["steps"] == [1, 2, 3]
        with run.metrics_file.open("a") as file:
            file.write('me": 1010.0, "reward/mean": 0.4}\n')
        add_metrics(run, 5)
        assert client.get("/runs/first/metrics", keys="reward/mean")["steps"] == [1, 2, 3, 4, 5]
        run.append_metrics({"kind": "resume", "step": 3, "time": 2000.0})
        add_metrics(run, 4, **{"reward/mean": 7.0})
        resumed = client.get("/runs/first/metrics", keys="reward/mean")
        assert (resumed["steps"], resumed["series"]["reward/mean"]["mean"][-1]) == ([1, 2, 3, 4], 7.0)
        run.path.rename(tmp_path / "gone")
        assert client.error("/runs/first", 404)[0] == "unknown_run"
        assert client.get("/runs/gone")["num_train"] == 4


def test_a_tokens_table_is_exact(runs_dir):
    import tiny

    pieces = pq.read_table(runs_dir / "first" / "tokens.parquet")["bytes"].to_pylist()
    text = "a café 🙂\n"
    assert b"".join(pieces[token] for token in tiny.tokenizer().encode(text, add_special_tokens=False)).decode() == text
