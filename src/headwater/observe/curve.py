"""The reward curve of a run, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_SMOOTHING = 0.8


def draw_reward_curve(
    path: Path,
    train: Sequence[tuple[int, float]],
    evaluation: Sequence[tuple[int, float]],
    title: str,
) -> None:
    """Mean reward per training step, smoothed and raw, and the held-out evaluations. Points: (step, reward)."""
    # The figure classes are used directly: pyplot would keep global state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, rewards = zip(*train, strict=True)
        axes.plot(steps, rewards, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(rewards), color="tab:blue", linewidth=2, label="training prompts (smoothed)")
    if evaluation:
        steps, rewards = zip(*evaluation, strict=True)
        axes.plot(steps, rewards, "o-", color="tab:orange", linewidth=1.5, label="held-out prompts")
        for step, reward in (evaluation[0], evaluation[-1]):
            axes.annotate(f"{reward:.2f}", (step, reward), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.margins(y=0.12)
    if train or evaluation:
        axes.legend(loc="best")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential average, corrected for its start."""
    smoothed: list[float] = []
    average = weight = 0.0
    for value in values:
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append(average / weight)
    return smoothed
