"""Workflows, one file each: how an episode runs, from a prompt to a scored trajectory. See docs/workflows.md.

A workflow is a class with ``async def run(self, episode)``, constructed with ``(context, **rollout.workflow_args)``, or
a function ``async def workflow(episode, **rollout.workflow_args)``. Classes with ``arun_episode(engine, data)`` and
agent loops for verl work too (``adapters``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from headwater.config.arguments import with_arguments
from headwater.core.errors import ConfigError
from headwater.core.registry import PythonObject, Registry, blaming, is_path
from headwater.workflows.episode import Episode, EpisodeResult, WorkflowContext

__all__ = [
    "WORKFLOWS",
    "EngineWorkflow",
    "Episode",
    "EpisodeRunner",
    "RolloutWorkflow",
    "WorkflowContext",
    "bind_workflow",
    "make_runner",
]

WORKFLOWS = Registry("workflow", "headwater.workflows")


class RolloutWorkflow(Protocol):
    """Runs one episode at a time; many episodes run concurrently on the same object."""

    async def run(self, episode: Episode) -> EpisodeResult: ...


@dataclass(frozen=True)
class EpisodeRunner:
    """How episodes run: ``runner.workflow.run(Episode(runner.context, engine, data))``."""

    workflow: RolloutWorkflow
    context: WorkflowContext
    name: str
    """The workflow's name in error messages."""


@dataclass(frozen=True)
class EngineWorkflow:
    """Adapter for classes with AReaL's ``arun_episode(engine, data)``, which send requests to the engine themselves."""

    wrapped: Any

    async def run(self, episode: Episode) -> EpisodeResult:
        result: EpisodeResult = await self.wrapped.arun_episode(episode.engine, episode.data)
        return result


@dataclass(frozen=True)
class FunctionWorkflow:
    """Adapter for a plain function ``async def workflow(episode)`` with its arguments bound."""

    run: Callable[[Episode], Coroutine[Any, Any, EpisodeResult]]


def bind_workflow(name: str, arguments: Mapping[str, Any]) -> Callable[[WorkflowContext], EpisodeRunner]:
    """A function that makes runners of the workflow that ``rollout.workflow`` names, with its arguments checked."""
    adapter = _adapter(name, arguments) if is_path(name) else None
    if adapter is not None:
        return adapter
    make = with_arguments(WORKFLOWS, name, arguments, "rollout.workflow_args")
    return partial(make_runner, name, make)


def make_runner(name: str, make: Callable[..., Any], context: WorkflowContext) -> EpisodeRunner:
    """A runner of the workflow that ``rollout.workflow`` names. ``make`` is that workflow with its arguments bound."""
    thing = WORKFLOWS.resolve(name)
    label = getattr(thing, "__name__", name)
    if inspect.iscoroutinefunction(thing):
        return EpisodeRunner(FunctionWorkflow(make), context, label)
    return EpisodeRunner(_as_workflow(make(context), f"rollout.workflow = {name}"), context, label)


def _adapter(name: str, arguments: Mapping[str, Any]) -> Callable[[WorkflowContext], EpisodeRunner] | None:
    """How to run a class that was written for verl or AReaL; None for other workflows."""
    # Imported here, because most runs do not need adapters.
    from headwater.workflows.adapters.areal_workflow import ArealWorkflow, is_areal_workflow
    from headwater.workflows.adapters.verl_loop import VerlWorkflow, is_agent_loop

    setting = f"rollout.workflow = {name}"
    with blaming(setting):
        thing = WORKFLOWS.resolve(name)
    if isinstance(name, PythonObject) and not inspect.isclass(thing) and not callable(thing):
        if arguments:
            raise ConfigError([f"rollout.workflow_args: {setting} is an object that is made already; remove this"])
        return lambda context: EpisodeRunner(_as_workflow(thing, setting), context, type(thing).__name__)
    kinds = ((is_agent_loop, VerlWorkflow), (is_areal_workflow, ArealWorkflow))
    made = next((made for is_kind, made in kinds if is_kind(thing)), None)
    if made is None:
        return None
    return lambda context: EpisodeRunner(made(thing, setting, arguments, context), context, thing.__name__)


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
