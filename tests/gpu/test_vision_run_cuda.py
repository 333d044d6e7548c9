"""A run with pictures from its start to its end on a GPU.

The same checks run on a CPU, which takes minutes:

    PYTHONPATH=tests:tests/unit python -c "from gpu.test_vision_run_cuda import check_run; check_run('/tmp/run', 'cpu')"
"""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.command import metrics, train_here

RECIPE = "vision-quickstart"
NUM_STEPS = 10
GUESS = 0.25
"""The share of right answers without looking: all four are equally frequent."""


@pytest.mark.parametrize(
    ("dtype", "max_gap", "max_mean_gap"),
    [("float32", 5e-3, 5e-4), ("bfloat16", 0.5, 0.03)],
    ids=["float32", "bfloat16"],
)
def test_a_run_with_pictures_learns_and_its_engine_has_the_weights_of_the_learner(
    tmp_path, dtype, max_gap, max_mean_gap
):
    check_run(tmp_path, "cuda", dtype, max_gap, max_mean_gap)


def check_run(
    root: Path | str, device: str, dtype: str = "float32", max_gap: float = 1e-3, max_mean_gap: float = 1e-4
) -> None:
    train_here(
        RECIPE, f"run.root={root}", "run.name=pictures", f"model.device={device}", f"model.dtype={dtype}",
        f"trainer.total_steps={NUM_STEPS}",
    )  # fmt: skip
    run = Path(root) / "pictures"
    steps = metrics(run, "train")
    assert [each["step"] for each in steps] == list(range(1, NUM_STEPS + 1))
    for each in steps:
        # After the first step, the engine has weights that were published. With float32, the gap is little more than
        # rounding, so weights that are older than the learner's would be noticed.
        assert each["rollout_gap/logprob_abs_max"] < max_gap, each["step"]
        assert each["rollout_gap/logprob_abs_mean"] < max_mean_gap, each["step"]
        assert each["actor/grad_norm"] > 0
    before, after = (each["reward/mean"] for each in metrics(run, "eval"))
    assert after > max(before + 0.15, 2 * GUESS)
