"""With ``run.deterministic``, runs on a GPU are equal to the bit: trained again, and resumed in the middle."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "integration"))
from command import same_weights, train_here, weights

from headwater.core.requests import SamplingParams
from headwater.engine.sampler import SamplingBatch, distribution
from headwater.models.device import sum_in_one_order, sums_restored

COMMON = [
    "run.deterministic=true", "eval.before=false", "eval.after=false", "eval.every_steps=0", "warm_start.num_steps=20",
    "warm_start.until_reward=0", "trainer.total_steps=6", "trainer.checkpoint_every_steps=3",
    "trainer.keep_checkpoints=9",
]  # fmt: skip
CASES = {
    "float32": ["quickstart", "model.dtype=float32"],
    "bfloat16": ["quickstart", "model.dtype=bfloat16"],
    "async": ["quickstart", "rollout.max_staleness=2"],
    "critic": ["quickstart", "ppo"],
    "corrected": ["quickstart", "algorithm.corrections=[m2po]"],
    "adapters": ["quickstart-lora"],
}


def checksums(run: Path) -> dict[int, str]:
    """Of all weights, by step. Lines after a resume replace earlier ones."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return {line["step"]: line["weights"] for line in lines if line["kind"] == "step"}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_same_bits(case, tmp_path):
    names = [each for each in CASES[case] if "=" not in each]
    order = [*names, *COMMON, *(each for each in CASES[case] if "=" in each), f"run.root={tmp_path}"]
    first, again, resumed = (tmp_path / name for name in ("first", "again", "resumed"))
    train_here(*order, "run.name=first")
    train_here(*order, "run.name=again")
    assert len(set(checksums(first).values())) > 3, "the weights change"
    assert checksums(again) == checksums(first)
    shutil.copytree(first, resumed)
    train_here("--resume", resumed, "--step", 3)
    assert checksums(resumed) == checksums(first)
    assert same_weights(weights(resumed, 6), weights(first, 6))
    assert not torch.are_deterministic_algorithms_enabled(), "other runs of this process are as fast as before"


def test_distributions_with_deterministic_kernels_are_those_without():
    logits = torch.randn(16, 1000, generator=torch.Generator().manual_seed(0)).cuda() * 3
    params = [SamplingParams(1, top_p=0.7, top_k=40 * (row % 2)) for row in range(16)]
    batch = SamplingBatch.build(params, list(range(16)), torch.device("cuda"))
    plain = distribution(logits, batch)
    with sums_restored():
        sum_in_one_order()
        torch.testing.assert_close(distribution(logits, batch), plain)
