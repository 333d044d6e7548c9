"""Runs of a vision model: pictures in prompts and from tools, killed, resumed and replayed to the last bit."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command import CUT_DOWN, PROCESS_LIMIT_S, ROOT, after_step, headwater, metrics, send, train_here
from picture_tools import TOOLS, VISION, picture
from test_kill import KINDS, killed_and_resumed

from headwater.cli.main import main
from headwater.core.media import MediaContent
from headwater.observe.media_store import MediaStore, placed_from_json
from headwater.observe.run_directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vision")]
ASYNC = ["rollout.max_staleness=2", "rollout.max_concurrent_groups=8"]


def rows_of(run: RunDirectory, step: int) -> list[dict]:
    return pq.read_table(run.path / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def check_row(run: RunDirectory, row: dict) -> int:
    """The row is consistent: its pictures are stored and masked, and both sides agree about the log-probs."""
    store, media = MediaStore(run.media), json.loads(row["media"])
    places = []
    for record in media:
        content = store.read(record)
        assert isinstance(content, MediaContent)
        item = placed_from_json(record, content)
        assert item.end <= len(row["tokens"])
        places += item.places().tolist()
    assert len(set(places)) == len(places)
    assert not any(row["loss_mask"][place] or row["versions"][place] != -1 for place in places)
    parts = [part for message in json.loads(row["messages"]) for part in message["content"] if isinstance(part, dict)]
    shown = [(part["type"], part["digest"]) for part in parts if part["type"] in ("image", "video")]
    assert shown == [(record["kind"], record["digest"]) for record in media]
    if {version for version in row["versions"] if version >= 0} == {row["step"] - 1}:  # the learner's own version
        assert row["logprob_gap"] < 1e-4
    return len(media)


def test_tools_show_pictures_in_a_run_that_can_be_replayed(tmp_path):
    run = RunDirectory(tmp_path / "tools")
    settings = [*CUT_DOWN, *TOOLS, *ASYNC, "engine.deterministic=true", "trainer.total_steps=3"]
    train_here(*VISION, *settings, f"run.root={tmp_path}", "run.name=tools")
    rows = [row for step in (1, 2, 3) for row in rows_of(run, step)]
    counts = [check_row(run, row) for row in rows]
    assert min(counts) == 1, "the picture of the prompt"
    assert max(counts) > 2, "pictures of tools"
    assert any(row["num_turns"] > 1 and row["logprob_gap"] < 1e-4 for row in rows)
    names = [path.name for path in run.media.iterdir()]
    assert names
    assert not [name for name in names if name.startswith(".")]
    with contextlib.chdir(ROOT):
        assert main(["replay", str(run.path)]) == 0


def test_answers_about_a_picture_are_given_again(tmp_path):
    turns = ["rollout.workflow=multi_turn", "rollout.workflow_args={max_turns: 2, max_turn_tokens: 4, feedback: No.}"]
    train_here(*VISION, *CUT_DOWN, *turns, "rollout.max_new_tokens=48", f"run.root={tmp_path}", "run.name=turns")
    rows = rows_of(RunDirectory(tmp_path / "turns"), 2)
    assert [check_row(RunDirectory(tmp_path / "turns"), row) for row in rows] == [1] * len(rows)
    assert all(row["num_turns"] == 2 and row["logprob_gap"] < 1e-4 for row in rows)


def test_an_agent_sends_the_picture_of_its_row(tmp_path):
    agent = ["rollout.workflow=endpoint", "rollout.workflow_args.agent=tests/integration/endpoint_agent.py:two_turns"]
    train_here(*VISION, *CUT_DOWN, *agent, "rollout.max_new_tokens=48", f"run.root={tmp_path}", "run.name=agent")
    rows = rows_of(RunDirectory(tmp_path / "agent"), 2)
    assert [check_row(RunDirectory(tmp_path / "agent"), row) for row in rows] == [1] * len(rows)
    assert all(json.loads(row["info"])["agent_calls"] == {"answered": 2} for row in rows)
    assert all(row["logprob_gap"] < 1e-4 for row in rows)


@pytest.mark.parametrize("model", ["tiny:qwen2_5_vl", "tiny:qwen3_vl", "tiny:smolvlm"])
def test_a_run_on_videos(tmp_path, model):
    for color in ("red", "green", "blue"):
        picture(color, (56, 56)).save(tmp_path / f"{color}.png")
    videos = [["red", "green"], ["green", "blue", "red", "red"], ["blue", "red", "green"], ["blue"] * 2]
    lines = [
        {"prompt": "<video>Which color?", "videos": [{"frames": [f"{color}.png" for color in colors], "fps": 2}]}
        for colors in videos
    ]
    lines = [{**each, "ground_truth": "red", "data_source": "exact_match"} for each in lines]
    (tmp_path / "videos.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    data = [f"data.train={tmp_path / 'videos.jsonl'}", "data.max_prompt_tokens=512", "eval.before=false"]
    cut_down = [each for each in CUT_DOWN if not each.startswith("data.num_")]  # a file is used in full
    settings = [*cut_down, *data, f"model.path={model}", "eval.after=false", f"run.root={tmp_path}", "run.name=videos"]
    train_here(*VISION, *settings)
    run = RunDirectory(tmp_path / "videos")
    rows = rows_of(run, 2)
    assert [check_row(run, row) for row in rows] == [1] * len(rows)
    assert {len(json.loads(row["media"])[0]["files"]) for row in rows} == {2, 3, 4}
    assert all(row["logprob_gap"] < 1e-4 for row in rows)


def settings_with_holes(root: Path, name: str, *settings: str) -> list[str]:
    """Of a run on pictures of which one file is missing and one is damaged. The run reads none of them at its start."""
    colors = ["red", "green", "blue", "gray", "orange", "purple", "white", "black"]
    lines = [{"prompt": "<image>Which color?", "images": [f"{color}.png"], "ground_truth": color} for color in colors]
    (root / "rows.jsonl").write_text(
        "".join(json.dumps({**each, "data_source": "exact_match"}) + "\n" for each in lines)
    )
    for color in colors[1:]:
        picture(color, (56, 56)).save(root / f"{color}.png")
    (root / "blue.png").write_bytes(b"no picture")
    cut_down = [each for each in CUT_DOWN if not each.startswith("data.num_")]
    return [
        *VISION, *cut_down, f"data.train={root / 'rows.jsonl'}", "data.truncation=left", "eval.before=false",
        "eval.after=false", "trainer.total_steps=4", f"run.root={root}", f"run.name={name}", *settings,
    ]  # fmt: skip


@pytest.mark.parametrize("scheduling", [[], ASYNC], ids=["in waves", "ahead"])
def test_rows_whose_picture_cannot_be_read_are_dropped_and_counted(tmp_path, scheduling):
    """16 of the groups that are trained come from three passes over eight rows, of which two are bad."""
    drop = ["rollout.on_failure=drop", "engine.deterministic=true", *scheduling]
    train_here(*settings_with_holes(tmp_path, "whole", *drop))
    run, half = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "half")
    steps = [each for each in map(json.loads, run.ledger_file.read_text().splitlines()) if each["kind"] == "step"]
    drops = [each for step in steps for each in step["dropped"]]
    assert {(each["uid"], each["kind"]) for each in drops} == {
        ("rows/train/0", "unreadable_row"), ("rows/train/2", "unreadable_row"),
    }  # fmt: skip
    assert any("line 1: images[0]: no such file" in each["message"] for each in drops)
    assert any("line 3: images[0]: not a readable image" in each["message"] for each in drops)
    assert sum(len(step["trained"]) for step in steps) == 16
    num_told = sum(each["groups/dropped_unreadable_row"] for each in metrics(run.path, "train"))
    assert 4 <= num_told <= len(drops), "what was dropped for later batches is not told yet"
    counts = steps[-1]["counts"]
    assert counts["dispatched"] == sum(counts[name] for name in ("trained", "dropped", "buffered", "in_flight"))
    assert "unreadable_row" in headwater("doctor", run.path).stdout
    with contextlib.chdir(ROOT):
        assert main(["replay", str(run.path)]) == 0
    train_here(*settings_with_holes(tmp_path, "half", *drop, "trainer.total_steps=2"))
    train_here("--resume", half.path, "trainer.total_steps=4")
    again = [each for each in map(json.loads, half.ledger_file.read_text().splitlines()) if each["kind"] == "step"]
    one, other = (
        {each["id"]: (each["index"], each["epoch"]) for step in made for each in step["trained"] + step["dropped"]}
        for made in (steps, again)
    )
    assert len(one.keys() & other.keys()) >= 12, "of 20 or more that have ended in each run"
    assert all(one[id] == other[id] for id in one.keys() & other.keys()), "the same prompts, in the same order"
    if not scheduling:  # otherwise, the times decide which groups make a batch
        assert num_told == len(drops)
        assert [step["weights"] for step in again] == [step["weights"] for step in steps]
        assert [step["dropped"] for step in again] == [step["dropped"] for step in steps]


def test_a_row_whose_picture_cannot_be_read_stops_a_run_by_default(tmp_path):
    result = headwater("train", *settings_with_holes(tmp_path, "stopped"))
    assert result.code == 2
    assert re.search(r"rows.jsonl, line [13]: images\[0\]: (no such file|not a readable image)", result.stderr), (
        result.stderr
    )


def as_verl_writes_it(split: str, row: dict, number: int) -> dict:
    """A row as in the files of verl's ``examples/data_preprocess/geo3k.py``."""
    problem, answer, images = row.pop("problem"), row.pop("answer"), row.pop("images")
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": problem + r" The final answer MUST BE put in \boxed{}."}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": number, "answer": answer, "question": problem},
    }


@pytest.mark.parametrize("layout", ["hub", "verl"])
def test_the_recipes_for_geometry3k(tmp_path, layout):
    """The recipes of the docs, with a tiny model and pictures of our own in the layout of the dataset."""
    datasets = pytest.importorskip("datasets")
    name, page = {"hub": "geometry3k", "verl": "geo3k"}[layout], (ROOT / "docs" / "data-and-rewards.md").read_text()
    (tmp_path / f"{name}.yaml").write_text(re.search(rf"`{name}.yaml`:\n\n```yaml\n(.*?)```", page, re.DOTALL)[1])
    rows = [
        {"images": [picture(color, (80, 60))], "problem": f"<image>Find x, {number}.", "answer": str(number)}
        for number, color in enumerate(("red", "green", "blue", "gray"))
    ]
    features = {"images": datasets.List(datasets.Image()), "problem": datasets.Value("string"),
                "answer": datasets.Value("string")}  # fmt: skip
    dataset = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    if layout == "hub":
        dataset.save_to_disk(tmp_path / "rows")
        data = [f"data.sources.geometry3k.source={tmp_path / 'rows'}"]
    else:
        files = {split: tmp_path / f"{split}.parquet" for split in ("train", "test")}
        for split, file in files.items():
            dataset.map(partial(as_verl_writes_it, split), with_indices=True).to_parquet(file)
        data = [f"data.train=[{files['train']}]", f"data.eval=[{files['test']}]"]
    cut_down = [each for each in CUT_DOWN if not each.startswith(("data.num_", "reward.function"))]
    run = RunDirectory(tmp_path / "geometry")
    train_here(
        str(tmp_path / f"{name}.yaml"), *cut_down, *data, "model.path=tiny:qwen2_5_vl", "rollout.max_new_tokens=24",
        "trainer.save_learner_logprobs=true", f"run.root={tmp_path}", "run.name=geometry",
    )  # fmt: skip
    rows = rows_of(run, 1)
    assert [check_row(run, row) for row in rows] == [1] * 8
    assert all(row["logprob_gap"] < 1e-4 for row in rows)
    assert {row["data_source"] for row in rows} == {"hiyouga/geometry3k"}
    assert {json.loads(row["messages"])[0]["role"] for row in rows} == {"system" if layout == "hub" else "user"}
    assert metrics(run.path, "train")[0]["media/images"] == 4


@pytest.mark.flaky(reruns=0)  # as in test_kill.py
def test_a_run_with_pictures_from_tools_is_killed_and_ends_bitwise_equal(tmp_path):
    assert killed_and_resumed("pictures", tmp_path, num_kills=3, seed=3) == 3


def test_pictures_ahead_of_training_are_in_the_checkpoint(tmp_path):
    """They are enough to resume, without the store of the run."""
    run = RunDirectory(tmp_path / "ahead")
    settings = [*KINDS["pictures"], f"run.root={tmp_path}", "run.name=ahead"]

    def interrupt() -> None:
        """When a group of the last step is complete. On a busy machine, all of them may still be in flight."""
        deadline = time.monotonic() + PROCESS_LIMIT_S
        while (status := json.loads(run.status_file.read_text())).get("step") != 2 or not status["ledger"]["buffered"]:
            assert time.monotonic() < deadline, "no group is complete"
            time.sleep(0.05)
        send(signal.SIGINT)

    with contextlib.chdir(ROOT), after_step(2, interrupt):
        main(["train", *settings])
    (last,) = (run.checkpoint(step) for step in run.checkpoint_steps()[-1:])
    stored = {path.name for path in (last / "media").iterdir()}
    finished = json.loads((last / "rollouts.json").read_text())["finished"]
    wanted = {
        name
        for each in finished
        for trajectory in each["trajectories"]
        for record in trajectory["media"]
        for name in record["files"]
    }
    assert wanted
    assert stored == wanted
    assert json.loads((last / "manifest.json").read_text()), "the pictures are sealed with the rest"
    (last / "media" / min(stored)).write_bytes(b"changed")
    result = headwater("train", "--resume", run.path)
    assert result.code == 2
    assert "damaged checkpoint" in result.stderr


def test_evaluation_and_export_of_a_run_with_pictures(tmp_path):
    train_here(*VISION, *CUT_DOWN, f"run.root={tmp_path}", "run.name=pictures")
    run = tmp_path / "pictures"
    result = headwater("eval", run, "--out", tmp_path / "out", "eval.num_prompts=4")
    assert result.code == 0, result.stderr
    (row, *_) = pq.read_table(tmp_path / "out" / "responses.parquet").to_pylist()
    (record,) = json.loads(row["media"])
    assert MediaStore(tmp_path / "out" / "media").read(record).digest == record["digest"]
    result = headwater("export", run, "--to", tmp_path / "model")
    assert result.code == 0, result.stderr
    assert (tmp_path / "model" / "preprocessor_config.json").is_file()
    assert 'pipeline_tag: "image-text-to-text"' in (tmp_path / "model" / "README.md").read_text()
    result = headwater("eval", tmp_path / "model", "--data", "shapes", "eval.num_prompts=4", "data.num_eval_rows=10")
    assert result.code == 0, result.stderr
