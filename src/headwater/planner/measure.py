"""Costs from measurements: of a run directory, or of the machine that this process runs on."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.config.schema import Config
from headwater.core.errors import HeadwaterError
from headwater.core.protocols import EpisodeEngine
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.observe.run_directory import RunDirectory
from headwater.planner.costs import Costs, GenerationCosts, LearnerCosts
from headwater.planner.workload import Lengths

_FIRST_STEPS = 2
"""Steps at the beginning of a run that are not counted if there are more: they include one-time work."""
_FIXED_SHARE = 0.5
_NEW_TOKENS = 32


def costs_of_run(folder: Path, config: Config) -> tuple[Costs, Lengths]:
    """What the steps of a run took. ``config`` is the run's own."""
    run = RunDirectory.open(folder)
    records = [each for each in run.read_metrics() if each["kind"] == "train"]
    records = records[_FIRST_STEPS:] if len(records) > _FIRST_STEPS else records
    if not records:
        raise HeadwaterError(f"--run {folder}: has no training steps yet; wait for some, or measure with --measure")
    lengths = Lengths.of_run(folder, config.rollout.num_samples_per_prompt)

    def median(name: str) -> float:
        return statistics.median(float(each.get(name, 0.0)) for each in records)

    num_prompts = config.trainer.num_prompts_per_step
    num_episodes = num_prompts * config.rollout.num_samples_per_prompt
    num_shown = num_prompts if config.learner.share_prompts else num_episodes
    response = median("response_length/mean")
    num_tokens = num_episodes * response + num_shown * lengths.prompt_tokens
    # The step in which the average token was generated, with the sequences that ran at that time.
    step_s = median("time/rollout/generate_s/mean") / max(1.0, response)
    generating = max(median("time/rollout/generate_s/max"), 1e-9)
    num_running = num_episodes * median("time/rollout/generate_s/mean") / generating
    costs = Costs(
        generation=GenerationCosts(
            step_s=max(_FIXED_SHARE * step_s, 1e-9),
            step_per_sequence_s=(1 - _FIXED_SHARE) * step_s / max(1.0, num_running),
            max_sequences=config.engine.max_sequences or 1024,
        ),
        learner=LearnerCosts(
            train_per_token_s=max(median("time/train_s") / num_tokens, 1e-12),
            experience_per_token_s=median("time/experience_s") / num_tokens,
            publish_s=median("time/publish_s"),
            pause_s=min(median("time/weights_pause_s"), median("time/publish_s")),
            step_s=median("time/record_s") + median("time/other_s"),
        ),
        source=f"measured: {len(records)} steps of {folder}",
        notes=(
            f"{_FIXED_SHARE:.0%} of a decode step is assumed not to depend on the number of sequences; "
            "--measure measures it",
        ),
    )
    return costs, lengths


def measure_generation(engine: EpisodeEngine, *, num_sequences: Sequence[int], prompt_tokens: int) -> GenerationCosts:
    """Generate with several batch sizes, and fit the coefficients of a decode step."""
    many = max(num_sequences)
    _seconds(engine, 1, prompt_tokens, _NEW_TOKENS, 0)  # one-time work
    prompts_s = [_seconds(engine, many, prompt_tokens, 1, 1 + number) for number in range(2)]
    prefill = min(prompts_s) / (many * prompt_tokens)
    steps = []
    for number, count in enumerate(num_sequences):
        short = min(_seconds(engine, count, prompt_tokens, 1, 10 * number + each) for each in range(3, 5))
        full = min(_seconds(engine, count, prompt_tokens, 1 + _NEW_TOKENS, 10 * number + each) for each in range(5, 7))
        steps.append((count, max(full - short, 1e-9) / _NEW_TOKENS))
    per_sequence, fixed = _line(steps)
    return GenerationCosts(step_s=fixed, step_per_sequence_s=per_sequence, prefill_per_token_s=prefill)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Slope and intercept of a line through the points, neither of them negative."""
    mean_x, mean_y = statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = min(max(slope, 0.0), min(y / x for x, y in points))
    return slope, max(mean_y - slope * mean_x, 1e-9)


def _seconds(engine: EpisodeEngine, count: int, prompt_tokens: int, new_tokens: int, seed: int) -> float:
    """The time of ``count`` responses to different prompts."""
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_end=True)
    requests = [
        ModelRequest(
            f"measure-{seed}-{number}",
            tuple(2 + (seed * 7919 + number * 31 + place * 17) % 97 for place in range(prompt_tokens)),
            sampling,
            rng_key=number,
        )
        for number in range(count)
    ]

    async def all_of_them() -> None:
        await asyncio.gather(*(engine.agenerate(each) for each in requests))

    began = time.perf_counter()
    asyncio.run(all_of_them())
    return time.perf_counter() - began


def measure(config: Config, folder: Path) -> tuple[Costs, Lengths]:
    """Time the engine of the recipe alone, then a few steps of the recipe in ``folder``, in this process."""
    from headwater.backends import BackendContext
    from headwater.models.device import with_dtype
    from headwater.models.load import load_tokenizer
    from headwater.observe.spans import Spans
    from headwater.trainer.rollout_setup import make_engine

    num_episodes = config.trainer.num_prompts_per_step * config.rollout.num_samples_per_prompt
    context = BackendContext(with_dtype(config), config.model.path, load_tokenizer(config.model.path), Spans(None))
    engine: Any = make_engine(context)
    try:
        room = engine.limits.max_request_tokens - _NEW_TOKENS - 1
        sizes = sorted({1, max(1, num_episodes // 8), num_episodes})
        generation = measure_generation(
            engine, num_sequences=sizes, prompt_tokens=max(1, min(config.data.max_prompt_tokens // 2, room))
        )
    finally:
        engine.close()
    costs, lengths = costs_of_run(_short_run(config, folder), config)
    limit = costs.generation.max_sequences
    measured = replace(costs, generation=replace(generation, max_sequences=limit), notes=())
    return replace(measured, source="measured: the engine alone, and a short run of the recipe here"), lengths


def _short_run(config: Config, folder: Path) -> Path:
    """A few steps of the recipe, in a child process, because a run installs handlers and uses threads."""
    import subprocess
    import sys

    from headwater.config.explain import to_yaml

    recipe = folder / "recipe.yaml"
    recipe.write_text(to_yaml(config), encoding="utf-8")
    command = [
        sys.executable, "-m", "headwater", "train", str(recipe), f"run.root={folder}", "run.name=measured",
        "trainer.total_steps=5", "trainer.save_rollouts_every_steps=1", "trainer.checkpoint_every_steps=0",
        "trainer.checkpoint_every_epochs=0", "trainer.checkpoint_every_minutes=0",
        "eval.before=false", "eval.after=false", "eval.every_steps=0", "eval.every_epochs=0",
        "rollout.max_staleness=0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise HeadwaterError(f"--measure: the short run failed: {done.stderr.strip()[-2000:]}")
    return folder / "measured"
