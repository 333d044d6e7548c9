"""Workflows, one file each: how an episode runs, from a prompt to a scored trajectory. See docs/workflows.md.

A workflow is a class with ``async def run(self, episode)``, constructed with ``(context, **rollout.workflow_args)``, or
a function ``async def workflow(episode, **rollout.workflow_args)``. Classes with ``arun_episode(engine, data)`` work
too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from headwater.core.errors import ConfigError
from headwater.core.registry import Registry
from headwater.workflows.episode import (
    EngineWorkflow,
    Episode,
    EpisodeRunner,
    FunctionWorkflow,
    RolloutWorkflow,
    WorkflowContext,
)

__all__ = [
    "WORKFLOWS",
    "EngineWorkflow",
    "Episode",
    "EpisodeRunner",
    "RolloutWorkflow",
    "WorkflowContext",
    "make_runner",
]

WORKFLOWS = Registry("workflow", "headwater.workflows")


def make_runner(name: str, make: Callable[..., Any], context: WorkflowContext) -> EpisodeRunner:
    """A runner of the workflow that ``rollout.workflow`` names. ``make`` is that workflow with its arguments bound."""
    thing = WORKFLOWS.resolve(name)
    label = getattr(thing, "__name__", name)
    if inspect.iscoroutinefunction(thing):
        return EpisodeRunner(FunctionWorkflow(make), context, label)
    return EpisodeRunner(_as_workflow(make(context), f"rollout.workflow = {name}"), context, label)


def _as_workflow(made: Any, setting: str) -> RolloutWorkflow:
    """``made`` as a workflow with ``run(episode)``."""
    if inspect.iscoroutinefunction(getattr(made, "run", None)):
        workflow: RolloutWorkflow = made
        return workflow
    if hasattr(made, "arun_episode"):
        return EngineWorkflow(made)
    raise ConfigError(
        [
            f"{setting}: a {type(made).__name__} is not a workflow; name a class with 'async def run(self, episode)', "
            "or a function 'async def workflow(episode)'"
        ]
    )
