"""Checks of the section ``tools``: are the tools of a recipe called, and does a workflow that calls tools have some?"""

from __future__ import annotations

from collections.abc import Iterator

from headwater.config.checks import Check, Clash, Layers, given_in, unread
from headwater.config.declared import WrongDeclaration, read_declared
from headwater.config.keys import value_at
from headwater.config.schema import Config
from headwater.config.traits import WorkflowTraits
from headwater.core.registry import is_path


def tools_are_called(config: Config, layers: Layers) -> Iterator[Clash]:
    workflow = config.rollout.workflow
    named = [key for key in ("tools.use", "tools.config") if value_at(config, key)]
    try:
        declared = read_declared(WorkflowTraits, workflow)
    except WrongDeclaration as error:
        yield Clash(("rollout.workflow",), str(error))
        return
    uses_tools = declared is not None and declared.traits.uses_tools
    if not named:
        why = "tools.use and tools.config name no tools; name some"
        yield from unread(given_in("tools", layers), ("tools.use", "tools.config"), why, layers)
        if uses_tools:
            yield Clash(("rollout.workflow", "tools.use"), "needs tools; name some in tools.use or tools.config")
    elif not uses_tools and not is_path(workflow):
        yield Clash(
            (named[0], "rollout.workflow"),
            f"rollout.workflow = {workflow} calls no tools; use rollout.workflow=tool_agent, or remove this",
        )


TOOL_CHECKS: tuple[Check, ...] = (tools_are_called,)
