"""The recorder writes everything that a run records."""

from __future__ import annotations

import io
import json
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import tiny
import torch
from rich.console import Console

from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.core.records import DropKind
from headwater.observe.media_store import MediaStore, placed_from_json
from headwater.observe.progress import Display
from headwater.observe.run_directory import RunDirectory
from headwater.observe.spans import Spans
from headwater.observe.trace import Trace
from headwater.observe.trackers import Trackers
from headwater.rollout.group import Dropped, Group, RolloutBatch, reward_metrics
from headwater.rollout.ledger import LedgerCounts
from headwater.rollout.snapshot import Books, RolloutSnapshot
from headwater.rollout.staleness import RolloutCounts
from headwater.trainer import recorder as recorder_module
from headwater.trainer.evaluate import Evaluation
from headwater.trainer.metrics import RunFacts
from headwater.trainer.recorder import Recorder
from headwater.trainer.tables import write_rollouts
from headwater.trainer.warm_start import WarmStartResult

COUNTS = LedgerCounts(12, 8, 2, buffered=1, in_flight=1)
ROLLOUTS = RolloutCounts(enqueued=1, running=2, accepted=9, rejected=5)
BOOKS = Books(RolloutSnapshot({}, {}), COUNTS, {}, ROLLOUTS, {"stale": 2, "invalid": 1})


class Remembers:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.records = []
        self.tables = []
        self.is_finished = False

    def start(self, config, name, *, project, folder) -> None: ...

    def log(self, step, metrics) -> None:
        self.records.append((step, metrics))

    def table(self, step, name, rows) -> None:
        self.tables.append((step, name, rows))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path, "run")


@pytest.fixture
def output():
    return io.StringIO()


@pytest.fixture
def tracker():
    return Remembers()


@pytest.fixture
def recorder(run, output, tracker):
    trace = Trace()
    display = Display(Console(file=output, width=200))
    trackers = Trackers({"remembers": tracker})
    trackers.start({}, "run", project="test", folder=run.path / "trackers")
    return Recorder(
        run,
        display,
        Spans(trace),
        trace,
        save_rollouts_every_steps=2,
        facts=RunFacts(max_prompt_tokens=9, num_devices=2),
        trackers=trackers,
        num_tracked_samples=1,
    )


def a_batch(dropped=()) -> RolloutBatch:
    trajectories = tuple(tiny.trajectory(seed, uid="row", sample=seed) for seed in range(2))
    return RolloutBatch((Group(tiny.prompt(), trajectories),), dropped, num_masked_tokens=3)


def test_every_record_reaches_the_file_and_the_trackers(recorder, run, tracker):
    recorder.warm_started(WarmStartResult(num_steps=7, loss=0.5))
    recorder.evaluation(0, Evaluation(0.25, 4, 1, 4, 3.0, 1.0, ((tiny.prompt(), tiny.trajectory(1)),)))
    recorder.begin_step()
    recorder.step(1, a_batch(), {"actor/loss": 0.5}, BOOKS)
    recorder.resumed(1)
    recorder.flush()
    written = run.read_metrics()
    assert [(each["kind"], each["step"]) for each in written] == [("warm_start", 0), ("eval", 0), ("train", 1)]
    assert (written[0]["num_steps"], written[1]["num_dropped"], written[2]["actor/loss"]) == (7, 1, 0.5)
    assert "kind" in run.ledger_file.read_text(), "a resume is noted in the ledger too"
    assert recorder.has_evaluation(0)
    assert not recorder.has_evaluation(1)
    recorder.close()
    assert tracker.is_finished
    prefixes = {"warm_start": "warm_start/", "eval": "eval/", "train": ""}
    kept = [{**each} for each in written]
    expected = []
    for each in kept:
        kind, step, _ = each.pop("kind"), each.pop("step"), each.pop("time")
        expected.append((step, {f"{prefixes[kind]}{name}": value for name, value in each.items()}))
    assert tracker.records == expected
    ((step, name, (row,)),) = tracker.tables
    assert (step, name, row["prompt"], row["uid"]) == (0, "eval/samples", tiny.prompt().text, "row")
    assert (run.path / "trace.json").exists()


def test_drops_are_counted_by_kind(recorder, run):
    dropped = [Dropped("row", kind, "why") for number, kind in enumerate(DropKind, start=1) for _ in range(number)]
    recorder.step(1, a_batch(tuple(dropped)), {}, BOOKS)
    recorder.flush()
    (record,) = run.read_metrics()
    expected = {kind: number for number, kind in enumerate(DropKind, start=1)}
    names = {
        DropKind.FILTERED: "groups/filtered", DropKind.REFUSED: "groups/refused",
        DropKind.STALE: "staleness/dropped_groups",
    }  # fmt: skip
    for kind, count in expected.items():
        assert record[names.get(kind, f"groups/dropped_{kind.value}")] == count, kind
    assert record["groups/dropped"] == sum(count for kind, count in expected.items() if kind.is_failure)
    assert record["staleness/masked_tokens"] == 3
    assert (record["rollouts/buffered"], record["rollouts/in_flight"]) == (1, 1)
    assert [record[f"rollouts/{name}"] for name in ("enqueued", "running", "accepted", "rejected")] == [1, 2, 9, 5]
    assert record["prompts/left_out"] == 0


STAGES = ("wait", "experience", "train", "publish", "record", "evaluate", "checkpoint", "offload", "other")


def test_a_long_evaluation_shows_how_far_it_is(recorder, monkeypatch):
    shown = []

    class Shown:
        @contextmanager
        def stage(self, name: str, total: int, start: int = 0):
            yield SimpleNamespace(update=lambda done, numbers: shown.append((name, done, total, dict(numbers))))

        def say(self, message: str) -> None: ...

    recorder._display = Shown()
    with recorder.evaluating(0, 7) as progress:
        progress(3)
    with recorder.training(1, 9), recorder.evaluating(1, 7) as progress:
        progress(4)  # at once: too short to be shown between steps
        monkeypatch.setattr(recorder_module, "_SHOW_EVERY_S", -1.0)
        progress(5)
    with recorder.evaluating(9, 7) as progress:
        progress(7)
    between = {"evaluated": "5 of 7 prompts"}
    assert shown == [("evaluate", 3, 7, {}), ("train", 1, 9, between), ("evaluate", 7, 7, {})]


def test_the_stages_of_a_step_add_up_to_it_and_every_moment_belongs_to_a_step(recorder, run):
    began = time.perf_counter()  # before the time of the first step begins
    with recorder.training(0, 2):
        for step in (1, 2):
            recorder.begin_step()
            with recorder.stage("wait"):
                time.sleep(0.02)
                with recorder.stage("publish"), recorder._spans.span("reward"):
                    time.sleep(0.03)
            time.sleep(0.01)
            recorder.step(step, a_batch(), {}, BOOKS)
            took_s = time.perf_counter() - began
            with recorder.stage("evaluate"), recorder._spans.span("generate"):
                time.sleep(0.04)
    first, second = run.read_metrics()
    for record in (first, second):
        stages = [record.get(f"time/{name}_s", 0.0) for name in STAGES]
        assert sum(stages) == pytest.approx(record["time/step_s"])
        assert record["time/publish_s"] >= 0.03
        assert record["time/wait_s"] < record["time/step_s"] - 0.03, "an inner stage does not count twice"
        assert record["time/reward_s"] >= 0.03
        assert "time/generate_s" not in record, "the rollouts of an evaluation are not those of a step"
        versions = [version for each in a_batch().trajectories for version in each.versions]
        num_tokens = sum(version >= 0 for version in versions)
        assert record["throughput/generated_tokens_per_s"] == pytest.approx(num_tokens / record["time/step_s"])
    assert "time/evaluate_s" not in first
    assert second["time/evaluate_s"] >= 0.04
    assert second["time/record_s"] > 0, "the rollout file of step 2"
    slept_s = 2 * (0.02 + 0.03 + 0.01) + 0.04
    assert slept_s <= first["time/step_s"] + second["time/step_s"] <= took_s


def test_rollouts_are_saved_every_few_steps(recorder, run):
    for step in (1, 2, 3):
        recorder.step(step, a_batch(), {}, BOOKS)
    recorder.flush()
    (file,) = (run.path / "rollouts").iterdir()
    assert file.name == "step_000002.parquet"
    assert pq.read_table(file).num_rows == 2


def test_the_ledger_gets_what_ended_and_the_checksum(recorder, run):
    ended = {"trained": [{"id": 3}], "dropped": [{"id": 4, "kind": "stale", "message": "old"}]}
    recorder.ledger(2, lambda: "float32-1", Books(RolloutSnapshot({}, {}), COUNTS, ended))
    recorder.flush()
    (line,) = run.read_ledger()
    assert (line["kind"], line["step"], line["weights"], line["dropped"]) == ("step", 2, "float32-1", ended["dropped"])
    assert line["counts"]["dispatched"] == 12


def test_progress_is_shown_while_training(recorder, output):
    with recorder.training(0, 2):
        recorder.begin_step()
        recorder.step(1, a_batch(), {}, BOOKS)
    assert "train 1/2  reward" in output.getvalue()
    assert "dropped 3 groups (2 stale, 1 invalid)" in output.getvalue()


def test_rollouts_can_be_read_back(tmp_path):
    said = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"})
    made = [tiny.trajectory(seed, uid="row", sample=seed) for seed in range(3)]
    trajectories = [replace(each, messages=said) for each in made]
    write_rollouts(tmp_path / "r.parquet", 4, [(tiny.prompt(), each) for each in trajectories])
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    for row, each in zip(rows, trajectories, strict=True):
        assert (row["step"], row["uid"], row["sample"]) == (4, "row", each.sample)
        assert row["tokens"] == list(each.tokens)
        assert row["loss_mask"] == list(each.loss_mask)
        assert row["versions"] == list(each.versions)
        assert row["logprobs"] == pytest.approx(each.logprobs)
        assert row["reward"] == each.reward
        assert json.loads(row["messages"]) == list(said)
        assert row["ended_by"] is None


def test_rollouts_refer_to_images_that_are_stored_once(tmp_path):
    picture = MediaContent.of("image", [b"\x89PNG a picture"])
    placed = PlacedMedia(picture, (MediaBlock(0, 1, (1, 1, 1)),))
    seen = {"role": "user", "content": [{"type": "image", "digest": picture.digest}, {"type": "text", "text": "What?"}]}
    said = (seen, {"role": "assistant", "content": "A"}, seen, {"role": "assistant", "content": "B"})
    made = [
        replace(tiny.trajectory(seed, sample=seed), media=(placed,) * (seed < 2), messages=said) for seed in range(3)
    ]
    store = MediaStore(tmp_path / "media")
    write_rollouts(tmp_path / "r.parquet", 4, [(tiny.prompt(), each) for each in made], store=store)
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert [path.name for path in (tmp_path / "media").iterdir()] == [f"{picture.digest}.png"]
    assert rows[2]["media"] is None
    for row in rows[:2]:
        (record,) = json.loads(row["media"])
        assert placed_from_json(record, store.read(record)) == placed
        assert json.loads(row["messages"])[0]["content"][0] == {"type": "image", "digest": picture.digest}


def test_what_a_scorer_returns_beside_the_reward_becomes_columns_and_metrics(tmp_path):
    infos = [
        {"acc": True, "why": "short", "parts": [1, 2], "odd": 1},
        {"acc": 0.0, "why": "half \ud800", "odd": "x"},
        {"acc": float("nan")},
    ]
    prompts = [tiny.prompt(data_source=name) for name in ("org/a", "org/a", "b")]
    made = [tiny.trajectory(seed, sample=seed, reward=seed) for seed in range(3)]
    made = [replace(each, reward_info=info) for each, info in zip(made, infos, strict=True)]
    rollouts = list(zip(prompts, made, strict=True))
    write_rollouts(tmp_path / "r.parquet", 4, rollouts)
    columns = pq.read_table(tmp_path / "r.parquet").to_pydict()
    assert columns["reward_acc"][:2] == [1.0, 0.0]
    assert columns["reward_why"] == ["short", "half \\ud800", None]
    assert columns["reward_parts"] == ["[1, 2]", None, None]
    assert columns["reward_odd"] == ["1", '"x"', None]
    assert reward_metrics(rollouts) == {
        "reward/org/a/mean": 0.5, "reward/b/mean": 2.0, "reward/acc/mean": 0.5, "reward/org/a/acc/mean": 0.5,
        "reward/odd/mean": 1.0, "reward/org/a/odd/mean": 1.0,
    }  # fmt: skip
    pieces = [(tiny.prompt(), tiny.trajectory(seed, sample=0, reward=seed)) for seed in (1, 2)]
    other = (tiny.prompt(), tiny.trajectory(3, sample=1, reward=4.5))
    assert reward_metrics([*pieces, other]) == {"reward/arithmetic/mean": 3.0}, "pieces of an episode count once"


def test_numbers_to_sort_by_are_saved_beside_the_lists(tmp_path):
    made = [tiny.trajectory(seed, sample=seed) for seed in range(3)]
    info = {"num_tool_calls": 3, "tool_failures": {"raised": 1, "timed_out": 1}}
    rest = (0.0,) * (len(made[0].turn_ends) - 1)
    made[0] = replace(made[0], info=info, turn_rewards=(made[0].reward, *rest))
    width = max(len(each.tokens) - each.prompt_length for each in made)
    columns = {"learner_logprobs": torch.full((3, width), -2.0)}
    write_rollouts(tmp_path / "r.parquet", 4, [(tiny.prompt(), each) for each in made], columns)
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert [row["num_tool_calls"] for row in rows] == [3, 0, 0]
    assert [row["num_failed_calls"] for row in rows] == [2, 0, 0]
    for row, each in zip(rows, made, strict=True):
        assert row["response_length"] == len(each.tokens) - each.prompt_length
        assert row["turn_rewards"] == list(each.turn_rewards)
        trained = [value for value, kept in zip(each.logprobs, each.loss_mask, strict=True) if kept]
        assert row["logprob_gap"] == (pytest.approx(max(abs(-2.0 - value) for value in trained)) if trained else None)


def test_the_bytes_of_the_vocabulary_are_saved_once(recorder, run):
    recorder.tokens(tiny.tokenizer())
    table = pq.read_table(run.tokens_file)
    text = "1+1= é🙂"
    tokens = tiny.tokenizer().encode(text, add_special_tokens=False)
    pieces = table["bytes"].to_pylist()
    assert b"".join(pieces[token] for token in tokens).decode() == text
    assert table["is_special"].to_pylist()[tiny.tokenizer().eos_token_id]
    assert table.schema.metadata[b"is_exact"] == b"1"
    before = run.tokens_file.stat().st_mtime_ns
    recorder.tokens(tiny.tokenizer())
    assert run.tokens_file.stat().st_mtime_ns == before


def test_a_response_of_several_turns_is_the_whole_conversation(tmp_path):
    example = ({"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"})  # part of the prompt
    turns = (
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "drei €"},
        {"role": "user", "content": "Nein."},
        {"role": "assistant", "content": "2"},
    )
    trajectory = replace(
        tiny.trajectory(0),
        tokens=(5, 6, 7, 8, 9),
        prompt_length=1,
        loss_mask=(0, 1, 0, 1, 1),
        logprobs=(0.0, -1.0, 0.0, -1.0, -1.0),
        versions=(-1, 0, -1, 0, 0),
        messages=(*example, *turns),
        info={"response_text": "2", "odd": "\ud800", "ended_by": "room"},
    )
    write_rollouts(tmp_path / "r.parquet", 4, [(tiny.prompt(), trajectory)])
    (row,) = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert (row["num_turns"], row["ended_by"]) == (2, "room")
    assert row["response"] == "[assistant]\ndrei €\n\n[user]\nNein.\n\n[assistant]\n2"
    assert "drei €" in row["messages"]
    assert json.loads(row["messages"]) == [*example, *turns]
    assert json.loads(row["info"])["odd"] == "\ud800"
