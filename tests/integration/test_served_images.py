"""A run whose engine is a separate process gets every image over the connection for requests."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command import headwater

pytestmark = pytest.mark.slow


def test_a_run_with_images_trains_with_an_engine_in_another_process(tmp_path: Path) -> None:
    trained = headwater("train", "vision-quickstart", f"run.root={tmp_path}", "run.name=served",
                        "warm_start.num_steps=0", "trainer.total_steps=3", "trainer.num_prompts_per_step=4",
                        "rollout.placement=disaggregated", "rollout.max_staleness=0", "data.num_train_rows=64",
                        "data.num_eval_rows=8")  # fmt: skip
    assert trained.code == 0, trained.stderr
    files = sorted((tmp_path / "served" / "rollouts").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, columns=["media", "logprob_gap", "step"]).to_pylist()]
    assert {row["step"] for row in rows} == {1, 2, 3}
    assert all(row["media"] for row in rows)
    # The learner's pictures did not travel, and both have the same weights, in later steps after updates of the tower.
    assert max(row["logprob_gap"] for row in rows) < 1e-4
    assert 4 <= len(list((tmp_path / "served" / "media").glob("*.png"))) <= 4 * 3 + 8
