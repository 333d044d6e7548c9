"""A run whose rows come from several data sources, each scored by the scorer that its name means."""

from __future__ import annotations

import json

import pyarrow.parquet as parquet
from command import ROOT, metrics

from headwater.cli.main import main

ROWS = [
    ("lighteval/MATH", "\\frac{1}{2}"),
    ("aime_2024", "204"),
    ("mbpp", ["assert f(1) == 1"]),
    ("searchR1_nq", {"target": ["me"]}),
]
RECIPE = f"""
run: {{name: mixed}}
model: {{path: "tiny:qwen3"}}
data:
  train: rows.jsonl
  eval: humaneval
  num_eval_rows: 1
  max_prompt_tokens: 1024
  task_args: {{humaneval: {{folder: {ROOT / "tests" / "data"}}}}}
rollout: {{max_new_tokens: 8, num_samples_per_prompt: 2}}
reward: {{workers: 1, timeout_s: 600}}
trainer: {{total_steps: 1, num_prompts_per_step: 4}}
eval: {{before: false}}
"""


def test_rows_of_several_data_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": source, "data_source": source, "reward_model": {"ground_truth": truth}} for source, truth in ROWS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mixed.yaml").write_text(RECIPE)
    assert main(["train", "mixed.yaml"]) == 0
    (step,) = metrics(tmp_path / "runs" / "mixed", "train")
    assert {source: step[f"reward/{source}/mean"] for source, _ in ROWS} == {
        "lighteval/MATH": 0.0, "aime_2024": -1.0, "mbpp": 0.0, "searchR1_nq": 0.0
    }  # fmt: skip
    assert step["reward/unverified/mean"] == step["reward/failed_calls"] == 0.0
    (evaluation,) = metrics(tmp_path / "runs" / "mixed", "eval")
    assert evaluation["reward/humaneval/acc/mean"] == 0.0
    (file,) = (tmp_path / "runs" / "mixed" / "rollouts").glob("*.parquet")
    table = parquet.read_table(file).to_pylist()
    assert {row["reward_verdict"] for row in table if row["data_source"] == "aime_2024"} == {"no_answer"}
    assert {row["reward_verdict"] for row in table if row["data_source"] == "mbpp"} == {"error"}
