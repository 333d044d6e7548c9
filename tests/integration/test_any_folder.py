"""A run with relative paths can be resumed and evaluated from any folder."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from command import metrics, weights

from headwater.cli.main import main

RECIPE = """
run: {name: mine, root: results}
model: {path: "tiny:qwen3"}
data: {train: "data/rows.jsonl", eval: "data/rows.jsonl", max_prompt_tokens: 32}
reward: {function: "reward.py:compute_score"}
rollout: {workflow: "flow.py:once", max_new_tokens: 4, num_samples_per_prompt: 2}
trainer: {total_steps: 1, num_prompts_per_step: 2, num_threads: 1}
eval: {num_prompts: 2, before: false}
"""
ROWS = '{"prompt": "2+3=", "ground_truth": "5"}\n{"prompt": "4+4=", "ground_truth": "8"}\n'
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 3\n"
FLOW = """
async def once(episode):
    await episode.reply()
    return episode.finish(await episode.score())
"""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A folder with the files of a run, which is the working directory, and an empty one."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (here / "data").mkdir(parents=True)
    elsewhere.mkdir()
    files = {"mine.yaml": RECIPE, "data/rows.jsonl": ROWS, "reward.py": REWARD, "flow.py": FLOW}
    for name, text in files.items():
        (here / name).write_text(text)
    monkeypatch.chdir(here)
    return here, elsewhere


def test_a_run_is_resumed_and_evaluated_elsewhere(folders, monkeypatch, capsys):
    here, elsewhere = folders
    assert main(["train", "mine.yaml"]) == 0, capsys.readouterr().err
    run = here / "results" / "mine"
    monkeypatch.chdir(elsewhere)
    assert main(["train", "--resume", str(run), "trainer.total_steps=2"]) == 0, capsys.readouterr().err
    assert len(metrics(run, "train")) == 2
    assert weights(run, 2)
    assert main(["eval", "../here/results/mine"]) == 0, capsys.readouterr().err
    # The same file by a relative path is not another file.
    same = ["data.train=../here/data/rows.jsonl", "trainer.total_steps=3"]
    assert main(["train", "--resume", str(run), *same]) == 0, capsys.readouterr().err
    assert not any(elsewhere.iterdir())
    assert len(list(run.glob("config*.yaml"))) == 3  # one for each number of steps, and none for the paths


def test_a_model_is_evaluated_without_a_run(folders, capsys):
    options = ["--data", "data/rows.jsonl", "--reward", "reward.py:compute_score", "rollout.max_new_tokens=4"]
    assert main(["eval", "tiny:qwen3", *options, "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "tiny:qwen3" in shown
    assert "rows/eval/0  reward" in shown
    # The same task from a recipe gives the same reward.
    assert main(["eval", "tiny:qwen3", "mine.yaml", "rollout.workflow=rlvr"]) == 0
    assert capsys.readouterr().out == shown.partition("rows/eval/0")[0]
    assert {path.name for path in folders[0].iterdir()} >= {"mine.yaml"}
    assert not (folders[0] / "results").exists()


def test_an_evaluation_of_several_sources_is_kept(folders, capsys):
    here, _ = folders
    (here / "[more].jsonl").write_text((here / "data" / "rows.jsonl").read_text())
    command = [
        "eval", "tiny:qwen3", "mine.yaml", "rollout.workflow=rlvr", "data.eval=['data/rows.jsonl', './[more].jsonl']",
        "eval.num_prompts=2", "eval.batch_size=1", "--out", "kept/here",
    ]  # fmt: skip
    assert main(command) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "By data source" in shown
    assert "[more]" in shown
    out = here / "kept" / "here"
    assert {path.name for path in out.iterdir()} == {
        "report.json", "responses.parquet", "responses_part_002.parquet",
    }  # fmt: skip
    report = json.loads((out / "report.json").read_text())
    assert (report["model"], report["num_prompts"], report["settings"]["batch_size"]) == ("tiny:qwen3", 2, 1)
    assert {"reward/mean", "reward/rows/mean", "reward/[more]/mean"} <= report.keys()
    rows = [row for path in sorted(out.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert [row["data_source"] for row in rows] == ["rows", "[more]"]
    assert report["reward/mean"] == sum(row["reward"] for row in rows) / 2
    assert main(command) == 2
    assert "--out kept/here: exists and is not empty; name a new folder" in capsys.readouterr().err


def test_what_eval_cannot_evaluate(folders, capsys):
    here, _ = folders
    (here / "results" / "mine").mkdir(parents=True)
    cases = [
        (["tiny:qwen3"], "say on what to evaluate it: name a recipe"),
        (["results/mine"], "not a run directory (config.yaml is missing) and not a model (config.json is missing)"),
        (["results/mnie", "quickstart"], "did you mean results/mine?"),
        (["tiny:qwen3", "quickstart", "--step", "3"], "--step = 3: goes with a run directory"),
        (["tiny:qwen", "quickstart"], "RUN|MODEL = tiny:qwen: unknown preset"),
    ]
    for arguments, message in cases:
        assert main(["eval", *arguments]) == 2
        assert message in capsys.readouterr().err
    (here / "results" / "mine" / "config.yaml").write_text("run: {name: x}\n")
    assert main(["eval", "results/mine", "quickstart"]) == 2
    assert "results/mine with the recipe quickstart: a run uses its own recipe" in capsys.readouterr().err
