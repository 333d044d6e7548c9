"""Rollouts on disk: one Parquet file per saved step, one row per trajectory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headwater.core.records import Prompt, Trajectory


def write_rollouts(path: Path, step: int, rollouts: Sequence[tuple[Prompt, Trajectory]]) -> None:
    """Write texts for people, and tokens with log-probs, masks and versions for programs."""
    rows = [
        {
            "step": step,
            "uid": trajectory.uid,
            "sample": trajectory.sample,
            "data_source": prompt.data_source,
            "prompt": prompt.text,
            "response": str(trajectory.info.get("response_text", "")),
            "ground_truth": json.dumps(prompt.ground_truth, default=str),
            "reward": trajectory.reward,
            "stop_reason": trajectory.stop_reason,
            "prompt_length": trajectory.prompt_length,
            "tokens": list(trajectory.tokens),
            "loss_mask": list(trajectory.loss_mask),
            "logprobs": list(trajectory.logprobs),
            "versions": list(trajectory.versions),
            "info": json.dumps(dict(trajectory.info), default=str),
        }
        for prompt, trajectory in rollouts
    ]
    temporary = path.with_name(f".{path.name}")
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    temporary.replace(path)
