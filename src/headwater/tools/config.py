"""Which tools a run has: the settings of the section ``tools``, and YAML files in our format and in both of verl's.

tools:
  - use: search                                # a built-in tool, file.py:Class, or file.py:function
    config: {corpus: documents.jsonl}
    timeout_s: 10                              # and max_concurrent, max_result_tokens, truncation
  - class_name: my_package.tools.Weather       # verl
    config: {type: native}
    tool_schema: {type: function, function: {...}}
  - tool_implementation: {class_path: my_package.tools, class_name: Weather, config: {}}
    tool_schema: {...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from headwater.config import yaml12
from headwater.config.recipe import TreeBuilder
from headwater.config.rollout_schema import ToolsConfig
from headwater.config.tree import Origin, plain
from headwater.core.errors import ConfigError
from headwater.core.registry import nearest, similar_path

LIMITS = ("timeout_s", "max_concurrent", "max_result_tokens", "truncation")
USE = "tools.use"
_KEYS = ("use", "class_name", "tool_implementation", "config", "tool_schema", "mcp", *LIMITS)


@dataclass(frozen=True)
class ToolEntry:
    """One tool, or one source of tools, before it is made."""

    place: str
    """Where it is configured, for messages."""
    thing: Any
    """The name of a built-in tool, a path to code, or an object from Python."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    schema: Any = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Those of ``LIMITS`` that differ from the section ``tools``."""
    folder: Path = field(default_factory=Path)
    """Where relative paths begin."""


def read_entries(config: ToolsConfig, objects: Sequence[Any] = ()) -> list[ToolEntry]:
    """The tools of ``tools.use``, of the file ``tools.config``, and objects that Python code passed."""
    unknown = [name for name in config.args if name not in config.use]
    if unknown:
        raise ConfigError(
            [f"tools.args.{name}: no such tool in tools.use; {nearest(name, [*config.use])}" for name in unknown]
        )
    entries = []
    for name in config.use:
        settings = config.args.get(name, {})
        if not isinstance(settings, Mapping):
            raise ConfigError([f"tools.args.{name} = {settings!r}: must be a mapping of settings"])
        entries.append(ToolEntry(f"{USE} = {name}", name, settings, folder=Path.cwd()))
    if config.config:
        entries += _read_file(Path(config.config).expanduser())
    return [*entries, *(ToolEntry(f"tool {getattr(each, '__name__', type(each).__name__)}", each) for each in objects)]


def _read_file(path: Path) -> list[ToolEntry]:
    value = _load(path)
    tools = value.get("tools")
    if not isinstance(tools, list) or not tools:
        raise ConfigError([f"{path}: tools = {tools!r}: must be a list of tools"])
    if unknown := [key for key in value if key != "tools"]:
        raise ConfigError([f"{path}: {unknown[0]}: no such key; known: tools"])
    problems: list[str] = []
    entries = []
    for index, entry in enumerate(tools):
        try:
            entries.append(_read_entry(entry, f"{path}: tools[{index}]", path.resolve().parent))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return entries


def _load(path: Path) -> Mapping[str, Any]:
    builder = TreeBuilder(Origin(str(path), 0))
    try:
        value = plain(builder.root(yaml12.compose(path.read_text(encoding="utf-8"))))
    except FileNotFoundError as error:
        raise ConfigError([f"tools.config = {path}: no such file{similar_path(path)}"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"tools.config = {path}: cannot be read ({error})"]) from error
    except yaml.YAMLError as error:
        where, why = yaml12.reason(error)
        raise ConfigError([f"{path}{where}: not valid YAML: {why}"]) from error
    if builder.problems:
        raise ConfigError([f"{origin}: {text}" for origin, text in builder.problems])
    loaded: Mapping[str, Any] = value
    return loaded


def _read_entry(entry: Any, place: str, folder: Path) -> ToolEntry:
    if not isinstance(entry, Mapping):
        raise ConfigError([f"{place} = {entry!r}: must be a mapping with the key use or class_name"])
    for key in entry:
        if key not in _KEYS:
            raise ConfigError([f"{place}.{key}: no such key; {nearest(key, [*_KEYS])}"])
    settings = _mapping(entry, "config", place)
    implementation = _mapping(entry, "tool_implementation", place)
    if implementation:
        for key in implementation:
            if key not in ("class_path", "class_name", "config"):
                raise ConfigError(
                    [f"{place}.tool_implementation.{key}: no such key; known: class_path, class_name, config"]
                )
        settings = {**settings, **_mapping(implementation, "config", f"{place}.tool_implementation")}
    named = _named(entry, implementation, place)
    limits = {key: entry[key] for key in LIMITS if entry.get(key) is not None}
    made = ToolEntry(place, named, settings, entry.get("tool_schema"), limits, folder)
    if "mcp" in entry or settings.get("type") == "mcp":
        servers = _verl_mcp(_mapping(entry, "mcp", place), place, folder)
        return replace(_renamed(made, "mcp", _VERL_MCP), settings=servers)
    return _renamed(made, *_VERL_CLASSES[named]) if named in _VERL_CLASSES else made


def _mapping(entry: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    value = entry.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError([f"{place}.{key} = {value!r}: must be a mapping"])
    return value


def _named(entry: Mapping[str, Any], implementation: Mapping[str, Any], place: str) -> str:
    """The tool as ``name``, ``package.module:Thing`` or ``file.py:Thing``."""
    given = [key for key in ("use", "class_name", "tool_implementation") if entry.get(key)]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "names no tool"
        raise ConfigError([f"{place}: {what}; give one of use, class_name, tool_implementation"])
    if given[0] == "use":
        return _text(entry["use"], f"{place}.use")
    source, key = (implementation, f"{place}.tool_implementation") if implementation else (entry, place)
    name = _text(source.get("class_name"), f"{key}.class_name")
    module = source.get("class_path") if implementation else None
    if module:
        module = _text(module, f"{key}.class_path")
        # Some files have the whole path in class_path, and the class again in class_name.
        return f"{module.removesuffix(f'.{name}')}:{name}"
    if ":" in name or "." not in name:
        return name
    module, _, thing = name.rpartition(".")
    return f"{module}:{thing}"


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError([f"{key} = {value!r}: must be text, for example my_package.tools.Weather"])
    return value


_VERL_CLASSES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "verl.tools.search_tool:SearchTool": (
        "http_search",
        {"retrieval_service_url": "url", "topk": "topk", "timeout": "timeout_s", "num_workers": "max_concurrent"},
    ),
    "verl.tools.sandbox_fusion_tools:SandboxFusionTool": (
        "sandbox_fusion",
        {
            "sandbox_fusion_url": "url", "default_timeout": "run_timeout_s", "default_language": "language",
            "memory_limit_mb": "memory_mib", "num_workers": "max_concurrent",
        },
    ),
}  # fmt: skip
"""verl's own tools, the built-in tools that speak the same protocols, and the names of their settings."""

_VERL_MCP = {"timeout": "timeout_s"}

_VERL_IGNORED = ("type", "rate_limit", "enable_global_rate_limit")
"""Settings of verl's own tools that ``max_concurrent`` replaces."""


def _renamed(entry: ToolEntry, name: str, renamed: Mapping[str, str]) -> ToolEntry:
    """The built-in tool ``name`` with the settings of a tool of verl's."""
    settings, limits = {}, dict(entry.limits)
    for key, value in entry.settings.items():
        if key in _VERL_IGNORED:
            continue
        if key not in renamed:
            raise ConfigError([f"{entry.place}.config.{key}: no such setting; {nearest(key, [*renamed])}"])
        target = renamed[key]
        if target in LIMITS:
            limits.setdefault(target, value)
        else:
            settings[target] = value
        if target == "max_concurrent":  # otherwise the tool's own number of connections would be the limit
            settings["max_connections"] = limits[target]
    return replace(entry, thing=name, settings=settings, limits=limits)


def _verl_mcp(mcp: Mapping[str, Any], place: str, folder: Path) -> Mapping[str, Any]:
    """The settings of the tool ``mcp`` from verl's ``mcp_servers_config_path`` and ``tool_selected_list``."""
    known = ("mcp_servers_config_path", "tool_selected_list")
    for key in mcp:
        if key not in known:
            raise ConfigError([f"{place}.mcp.{key}: no such key; {nearest(key, [*known])}"])
    path = folder / _text(mcp.get("mcp_servers_config_path"), f"{place}.mcp.mcp_servers_config_path")
    try:
        servers = json.loads(path.read_text(encoding="utf-8"))["mcpServers"]
    except OSError as error:
        raise ConfigError(
            [f"{place}.mcp.mcp_servers_config_path = {path}: cannot be read ({error.strerror})"]
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{path}: must be JSON with the key mcpServers"]) from error
    selected = mcp.get("tool_selected_list")
    return {"servers": servers, **({"tools": selected} if selected else {})}
