"""Trackers get every record in their own thread, and whatever they do, the run continues."""

from __future__ import annotations

import io
import json
import logging
import struct
import threading
import time

import pytest
from patience import long_enough
from rich.console import Console

from headwater.config.load import load_config
from headwater.core.errors import ConfigError, UnknownName
from headwater.observe import trackers as package
from headwater.observe.progress import Display
from headwater.observe.trackers import Trackers

ROWS = [
    {"prompt": "1+1=", "response": "2 | two\nlines", "reward": 1.0},
    {"prompt": "2+2=", "response": "4", "reward": 0.0},
]
METRICS = [{"reward/mean": 0.25, "tools/calls": 1, "tools/calls/x": 2.5}, {"reward/mean": 0.5, "odd": float("nan")}]


def run_all(made: Trackers, folder, *, limit_s: float = 300.0) -> list[str]:
    made.start({"run": {"name": "small", "stop": ("a", "b")}}, "small", project="sums", folder=folder)
    for step, metrics in enumerate(METRICS, start=1):
        made.log(step, metrics)
    made.table(2, "eval/samples", ROWS)
    return made.finish(limit_s)


class Own:
    """A tracker of a user, which does what ``problem`` says."""

    def __init__(self, *, problem: str = "") -> None:
        self.problem = problem
        self.calls = []
        self.may_end = threading.Event()

    def start(self, config, name, *, project, folder):
        assert config["run"]["stop"] == ["a", "b"], "lists, which every format has"
        self.calls.append(("start", name, project, folder.name))
        if self.problem == "start":
            raise RuntimeError("no credentials")

    def log(self, step, metrics):
        if self.problem == "hang":
            self.may_end.wait(600)
        if self.problem == "log" and step == 1:
            raise SystemExit("gone")
        self.calls.append((step, metrics))

    def table(self, step, name, rows):
        self.calls.append((step, name, rows))

    def finish(self):
        self.calls.append("finish")


def test_a_tracker_gets_everything_in_order(tmp_path):
    own = Own()
    assert run_all(Trackers({"file.py:Own": own}), tmp_path) == []
    started = ("start", "small", "sums", "Own")
    assert own.calls == [started, (1, METRICS[0]), (2, METRICS[1]), (2, "eval/samples", ROWS), "finish"]


def test_a_tracker_that_fails_is_warned_about_once_and_named_at_the_end(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        good, at_start, at_log = Own(), Own(problem="start"), Own(problem="log")
        problems = run_all(Trackers({"good": good, "at_start": at_start, "at_log": at_log}), tmp_path)
    assert len(good.calls) == 5
    first, second = problems
    assert first == "tracker at_start: 4 records were lost; the first cause: RuntimeError: no credentials"
    assert second == "tracker at_log: 1 records were lost; the first cause: SystemExit: gone"
    assert "finish" not in at_start.calls
    assert [each for each in at_log.calls if each == "finish"], "the others were still logged"
    assert sum("training continues" in each.message for each in caplog.records) == 2


def test_a_tracker_that_hangs_delays_neither_the_run_nor_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "_MOST_WAITING", 3)

    def check(limit_s: float) -> None:
        slow, good = Own(problem="hang"), Own()
        made = Trackers({"slow": slow, "good": good})
        made.start({"run": {"stop": ("a", "b")}}, "small", project="sums", folder=tmp_path)
        try:
            for step in range(20):
                made.log(step, {})
                if step % 3 == 0:
                    _eventually(lambda step=step: len(good.calls) == step + 2)
            assert len(slow.calls) <= 1, "no call waited for it"
            (problem,) = made.finish(limit_s=limit_s)
        finally:
            slow.may_end.set()
        assert problem.startswith(f"tracker slow: did not end within {limit_s:.0f} s")
        assert "records were lost; the first cause: is too slow" in problem
        assert len(good.calls) == 22

    long_enough(check, 0.2, 10.0)


def _eventually(holds) -> None:
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    assert holds()


def test_wrong_names_and_arguments_are_told_before_a_run(monkeypatch):
    with pytest.raises(UnknownName, match="unknown tracker 'wandbb'; did you mean 'wandb'"):
        Trackers.of(["wandbb"], {})
    with pytest.raises(ConfigError, match=r"trainer.tracker_args.console.onyl = 1: no such argument; .* takes only"):
        Trackers.of(["console"], {"console": {"onyl": 1}})
    with pytest.raises(ConfigError, match=r"tracker_args.wandb.mode = 'off': .* did you mean 'offline'"):
        Trackers.of(["wandb"], {"wandb": {"mode": "off"}})
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):
        with pytest.raises(ConfigError, match=rf"needs the package {name}, .* pip install 'headwater\[{name}\]'"):
            Trackers.of([name], {})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["trainer.trackers=[wand]"], "did you mean 'wandb'"),
        (["trainer.trackers=[console, console]"], "names console twice"),
        (["trainer.trackers=[console]", "trainer.tracker_args.wandb.mode=offline"], "does not name wandb"),
        (["trainer.num_tracked_samples=3"], "nothing reads this, because trainer.trackers is empty"),
        (["trainer.profile.steps=[3, 400]"], "the run has no step 400"),
        (["trainer.profile.steps=[3]", "trainer.profile.ranks=[]"], "names no rank"),
        (["trainer.profile.memory=true"], "nothing reads this, because trainer.profile.steps is empty"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        load_config(["quickstart"], settings)


def test_profiled_steps_of_epochs_are_not_known_yet():
    config = load_config(["quickstart"], ["trainer.profile.steps=[400]", "trainer.total_epochs=2"]).config
    assert config.trainer.profile.steps == (400,)


def test_the_console_prints_all_metrics_or_those_that_are_asked_for(tmp_path):
    output = io.StringIO()
    made = Trackers.of(["console"], {"console": {"only": ["reward/"]}}, Display(Console(file=output, width=80)))
    assert run_all(made, tmp_path) == []
    assert output.getvalue().splitlines()[:2] == ["step:1 - reward/mean:0.25", "step:2 - reward/mean:0.5"]
    assert "response='2 | two\\nlines'" in output.getvalue()
    few = Trackers.of(["console"], {"console": {"only": ["odd"]}}, Display(Console(file=(output := io.StringIO()))))
    assert run_all(few, tmp_path) == []
    assert output.getvalue().splitlines()[0] == "step:2 - odd:nan", "nothing is said about a step without them"


def test_json_lines_of_several_runs_share_a_file(tmp_path):
    file = tmp_path / "shared" / "all.jsonl"
    for _ in range(2):
        assert run_all(Trackers.of(["jsonl"], {"jsonl": {"path": str(file)}}), tmp_path) == []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 6
    assert (lines[0]["project"], lines[0]["run"], lines[0]["step"]) == ("sums", "small", 1)
    assert lines[0]["metrics"] == METRICS[0]
    assert (lines[2]["table"], lines[2]["rows"]) == ("eval/samples", ROWS)


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard", reason="NO TENSORBOARD: pip install 'headwater[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run_all(Trackers.of(["tensorboard"], {}), tmp_path) == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    (table,) = events.Tensors("eval/samples/text_summary")
    assert b"| 1+1= | 2 \\| two<br>lines | 1.0 |" in table.tensor_proto.string_val[0]
    assert b"name: small" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_after_a_resume_tensorboard_shows_only_the_new_steps(tmp_path):
    pytest.importorskip("tensorboard", reason="NO TENSORBOARD: pip install 'headwater[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, value in ((range(1, 5), 0.25), (range(3, 6), 0.5)):  # killed after step 4, resumed after step 2
        made = Trackers.of(["tensorboard"], {})
        made.start({"run": {"name": "small"}}, "small", project="sums", folder=tmp_path)
        for step in steps:
            made.log(step, {"reward/mean": value})
        assert made.finish(300.0) == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(each.step, each.value) for each in events.Scalars("reward/mean")]
    assert shown == [(1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5)]
    made = Trackers.of(["tensorboard"], {})  # resumed after the last step, whose evaluation was missing
    made.start({"run": {"name": "small"}}, "small", project="sums", folder=tmp_path)
    made.log(5, {"eval/reward/mean": 1.0})
    assert made.finish(60.0) == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [each.step for each in events.Scalars("reward/mean")] == [1, 2, 3, 4, 5]
    assert [each.step for each in events.Scalars("eval/reward/mean")] == [5]


def test_wandb_works_offline_and_continues_a_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="NO WANDB: pip install 'headwater[wandb]'")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    try:
        for _ in range(2):
            assert run_all(Trackers.of(["wandb"], {"wandb": {"mode": "offline"}}), tmp_path) == []
    finally:
        wandb.teardown()
    folder = tmp_path / "wandb"
    files = sorted(folder.rglob("*.wandb"))
    run_id = (folder / "run_id").read_text()
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * len(files)
    logged = {}
    for record in wandb_records(files[0], wandb_internal_pb2):
        for item in record.history.item:
            logged.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    assert logged["reward/mean"] == [0.25, 0.5]
    assert logged["trainer/step"] == [1, 2, 2]
    assert (logged["eval/samples/ncols"], logged["eval/samples/nrows"]) == ([3], [2])


def wandb_records(file, messages):
    """The records of an offline file: a header, then blocks of 32 KiB with chunks (checksum, length, kind, data)."""
    data, whole, at = file.read_bytes(), b"", 7
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield messages.Record.FromString(whole)


def test_wandb_without_credentials_does_not_stop_a_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="NO WANDB: pip install 'headwater[wandb]'")
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    try:
        (problem,) = run_all(Trackers.of(["wandb"], {"wandb": {"mode": "online"}}), tmp_path)
    finally:
        wandb.teardown()
    assert "4 records were lost" in problem
    assert "trainer.tracker_args.wandb.mode=offline" in problem
