"""Makes the tools of a run from their entries."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from headwater.config.arguments import broken_rules
from headwater.config.convert import convert_value
from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.registry import blaming, nearest
from headwater.tools import TOOLS
from headwater.tools.config import LIMITS, USE, ToolEntry
from headwater.tools.function import FunctionTool
from headwater.tools.loaded import MadeTool, ToolLimits, ToolMethods
from headwater.tools.running import Slots, call_method
from headwater.tools.schema import ToolSchema

logger = logging.getLogger(__name__)

_GIVEN = ("config", "tool_schema", "sandbox")
"""Parameters of a tool's class that are no settings."""


class ToolMaker:
    """Makes tools, and closes what they share."""

    start_limit_s = 120.0

    def __init__(self, config: ToolsConfig, sandbox: SandboxConfig) -> None:
        self._config = config
        self._sandbox_config = sandbox
        self._sandbox: Any = None
        self._made: list[Any] = []

    async def make(self, entries: Sequence[ToolEntry]) -> list[MadeTool]:
        made = []
        for entry in entries:
            tool = self._tool(entry)
            self._made.append(tool)
            limits = self._limits(entry)
            if hasattr(tool, "list_tools"):
                with blaming(entry.place):
                    made += [_made(each, None, entry, limits) for each in await tool.list_tools()]
            else:
                made.append(_made(tool, entry.schema, entry, limits))
        return made

    @property
    def runs_code(self) -> bool:
        """Whether a tool uses the sandbox."""
        return self._sandbox is not None

    async def close(self, limit_s: float) -> None:
        for tool in self._made:
            close = getattr(tool, "close", None)
            if not callable(close):
                continue
            try:
                await Slots("close", 1).run(partial(call_method, close), limit_s)
            except Exception:  # a tool may raise anything, and the others must be closed too
                logger.warning("a tool could not be closed", exc_info=True)
        if self._sandbox is not None:
            self._sandbox.close()

    def _tool(self, entry: ToolEntry) -> Any:
        thing = entry.thing
        if isinstance(thing, str):
            with blaming(entry.place):
                thing = TOOLS.resolve(_absolute(thing, entry.folder))
        if inspect.isclass(thing):
            return self._instance(thing, entry)
        if callable(getattr(thing, "execute", None)) or hasattr(thing, "list_tools"):
            return thing
        if not inspect.isroutine(thing):
            raise ConfigError(
                [f"{entry.place}: {thing!r} is not a tool; name a class with an execute method, or a function"]
            )
        if entry.settings:
            raise ConfigError([f"{entry.place}: is a function and has no settings; remove {', '.join(entry.settings)}"])
        return FunctionTool(thing, entry.schema)

    def _instance(self, tool_class: Any, entry: ToolEntry) -> Any:
        if not callable(getattr(tool_class, "execute", None)) and not hasattr(tool_class, "list_tools"):
            raise ConfigError(
                [f"{entry.place}: class {tool_class.__name__} has no execute method, so it is not a tool"]
            )
        parameters = inspect.signature(tool_class).parameters
        given: dict[str, Any] = {}
        if "config" in parameters:
            given["config"] = dict(entry.settings)
        else:
            given |= _settings(tool_class, entry)
        if "tool_schema" in parameters and entry.schema is not None:
            given["tool_schema"] = ToolSchema.read(entry.schema, entry.place)
        elif "tool_schema" in parameters and parameters["tool_schema"].default is inspect.Parameter.empty:
            given["tool_schema"] = None
        if "sandbox" in parameters:
            given["sandbox"] = self._shared_sandbox()
        try:
            return tool_class(**given)
        except ConfigError as error:
            raise ConfigError([f"{entry.place}: {problem}" for problem in error.problems]) from error
        except HeadwaterError as error:
            raise HeadwaterError(f"{entry.place}: {error}") from error
        except Exception as error:  # a user's class may raise anything
            raise HeadwaterError(
                f"{entry.place}: raised {type(error).__name__}: {error}; run with --debug to see where"
            ) from error

    def _shared_sandbox(self) -> Any:
        if self._sandbox is None:
            from headwater.sandbox import Sandbox

            self._sandbox = Sandbox(self._sandbox_config)
        return self._sandbox

    def _limits(self, entry: ToolEntry) -> ToolLimits:
        defaults = ToolLimits(*(getattr(self._config, key) for key in LIMITS))
        hints = get_type_hints(ToolsConfig, include_extras=True)
        problems = [
            f"{entry.place}.{name} = {entry.limits[name]!r}: {reason}"
            for name, reason in broken_rules({key: hints[key] for key in LIMITS}, {}, entry.limits)
        ]
        if problems:
            raise ConfigError(problems)
        return replace(defaults, **{name: convert_value(hints[name], value) for name, value in entry.limits.items()})


def _made(tool: Any, schema: Any, entry: ToolEntry, limits: ToolLimits) -> MadeTool:
    if schema is None:
        get = getattr(tool, "get_openai_tool_schema", None)
        schema = getattr(tool, "tool_schema", None) or (get() if callable(get) else None)
    return MadeTool(tool, ToolSchema.read(schema, entry.place), limits, ToolMethods.of(tool), entry.place)


def _absolute(name: str, folder: Path) -> str:
    """``file.py:Thing`` relative to the folder of the entry."""
    module, colon, thing = name.rpartition(":")
    return f"{folder / Path(module).expanduser()}{colon}{thing}" if module.endswith(".py") else name


def _settings(tool_class: Any, entry: ToolEntry) -> dict[str, Any]:
    """The settings as keyword arguments of the class, with checked types and absolute paths."""
    signature = inspect.signature(tool_class).parameters
    parameters = {
        name: each for name, each in signature.items()
        if name not in _GIVEN and each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
    }  # fmt: skip
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.values())
    key = f"tools.args.{entry.thing}" if entry.place.startswith(USE) else f"{entry.place}.config"
    hints = {name: hint for name, hint in _hints(tool_class).items() if name in parameters}
    problems = [
        f"{key}.{name} = {value!r}: no such setting; {nearest(name, [*parameters])}"
        for name, value in entry.settings.items()
        if name not in parameters and not takes_any
    ]
    given = dict(entry.settings)
    typed = {name: value for name, value in given.items() if name in hints}
    problems += [f"{key}.{name} = {given[name]!r}: {reason}" for name, reason in broken_rules(hints, {}, typed)]
    problems += [
        f"{key}.{name}: is missing; this tool requires it"
        for name, each in parameters.items()
        if each.default is each.empty and name not in given
    ]
    if problems:
        raise ConfigError(problems)
    return {name: _converted(hints.get(name, Any), value, entry.folder) for name, value in given.items()}


def _hints(tool_class: Any) -> dict[str, Any]:
    try:
        return get_type_hints(tool_class.__init__, include_extras=True)
    except Exception:  # noqa: BLE001  the hints of a user's class may name what only type checkers import
        return {}


def _converted(hint: Any, value: Any, folder: Path) -> Any:
    if hint is Path or Path in get_args(hint):
        return folder / Path(str(value)).expanduser()
    return convert_value(hint, value)
