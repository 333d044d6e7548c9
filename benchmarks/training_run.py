"""One run of the trainer in this process, like ``headwater train``, for benchmarks that compare runs."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from headwater.config.explain import to_yaml
from headwater.config.load import load_config
from headwater.learner.build import LearnerSpec
from headwater.observe.progress import Display
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.learner_setup import build_training
from headwater.trainer.loop import Trainer
from headwater.trainer.rollout_setup import build_rollout


def train(recipe: str | Path | None, settings: Mapping[str, Any], root: Path) -> RunDirectory:
    """Train ``recipe`` with ``settings`` (``"rollout.max_staleness": 2``) to its end; what it wrote is under ``root``.

    It prints nothing. With ``trainer.trace`` the run's trace.json is there too.
    """
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**settings, "run.root": str(root)}.items()]
    config = load_config(recipe, overrides).config
    rollout = build_rollout(config, config.model.path)
    try:
        training = build_training(LearnerSpec(config, config.model.path, config.model.path), rollout.tokenizer)
        run = RunDirectory.create(root, config.run.name)
        run.write_config(to_yaml(config))
        if not Trainer(config, rollout, training, run, Display(Console(file=io.StringIO()))).fit():
            raise KeyboardInterrupt  # the trainer took the signal; it is meant for the whole comparison
    finally:
        rollout.close()
    return run


def records(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [each for each in run.read_metrics() if each["kind"] == kind]


def mean_lag(steps: list[dict[str, Any]]) -> float:
    """How many versions behind trained tokens were, on average over steps."""
    prefix = "staleness/lag_"
    lags = [
        sum(int(name.removeprefix(prefix)) * share for name, share in each.items() if name.startswith(prefix))
        for each in steps
    ]
    return sum(lags) / len(lags)
