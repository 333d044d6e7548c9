"""The parameters of a scoring function: which values it receives, checked before a run is made.

A function receives what it names. These signatures work, and so does any selection of their names:

    def compute_score(data_source, solution_str, ground_truth, extra_info, **settings)              # one response
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **settings)          # lists
    def reward(prompts, completions, **columns)                                                     # lists
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.core.errors import RewardFailed
from headwater.core.records import Prompt
from headwater.core.registry import nearest

ROW_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a function with ``**settings`` receives."""
BATCH_NAMES = ("prompts", "completions")
PLURALS = {name: f"{name}s" for name in ROW_NAMES}
"""A function that names one of ``BATCH_NAMES`` or of these works on lists, and returns a list."""


@dataclass(frozen=True)
class Signature:
    """Which values a scoring function receives."""

    names: frozenset[str]
    """The values of the episode that it takes: ``ROW_NAMES``, ``messages``, ``BATCH_NAMES``."""
    columns: frozenset[str] = frozenset()
    """Its parameters that are columns of the data."""
    required: tuple[str, ...] = ()
    """Those of ``columns`` that have no default."""
    takes_rest: bool = False
    """Whether it receives all other columns of the row, too."""
    is_batched: bool = False
    """Whether values are lists, and the result as well."""
    plural: Mapping[str, str] = field(default_factory=dict)
    """The names under which it receives lists, where they differ: ``solution_str`` as ``solution_strs``."""
    where: str = ""
    """The setting, and where the function is defined."""

    def check_row(self, prompt: Prompt) -> None:
        """Raise ``RewardFailed`` if the row lacks a column that the function requires."""
        missing = [name for name in self.required if name not in prompt.columns]
        if missing:
            known = [*ROW_NAMES, "messages", *BATCH_NAMES, *prompt.columns]
            raise RewardFailed(
                f"{self.where}: nothing provides its parameter {missing[0]!r} for row {prompt.uid}; "
                f"{nearest(missing[0], known)}; rename it, give it a default, or set reward.function_args.{missing[0]}",
                cause="bad_arguments",
            )


def read_signature(function: Callable[..., Any], settings: Mapping[str, Any], setting: str) -> Signature:
    """``settings`` are ``reward.function_args``; ``setting`` names the function in messages."""
    where = f"{setting}{defined_at(function)}"
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return Signature(frozenset(ROW_NAMES), where=where)
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    takes_rest = any(each.kind is each.VAR_KEYWORD for each in parameters)
    nameless = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY and each.default is each.empty]
    if nameless:
        raise RewardFailed(f"{where}: its parameter {nameless[0]!r} cannot be given by name; remove the '/' after it")
    unknown = [name for name in settings if name not in named and not takes_rest]
    if unknown:
        hint = nearest(unknown[0], list(named))
        raise RewardFailed(f"reward.function_args.{unknown[0]}: {where} has no such parameter; {hint}")
    is_plural = not named.keys().isdisjoint(PLURALS.values())
    is_batched = is_plural or not named.keys().isdisjoint(BATCH_NAMES)
    plural = {name: many for name, many in PLURALS.items() if many in named or (is_plural and takes_rest)}
    provided = {*ROW_NAMES, "messages", *BATCH_NAMES}
    names = {name for name in named if name in provided} | plural.keys()
    if takes_rest and not is_plural:
        names |= {*(BATCH_NAMES if is_batched else ROW_NAMES)}
    columns = named.keys() - provided - settings.keys() - {*plural.values()}
    return Signature(
        names=frozenset(names - settings.keys()),
        columns=frozenset(columns),
        required=tuple(name for name in named if name in columns and named[name].default is inspect.Parameter.empty),
        takes_rest=takes_rest and is_batched and not is_plural,
        is_batched=is_batched,
        plural=plural,
        where=where,
    )


def defined_at(function: Callable[..., Any]) -> str:
    """For example `` (reward.py:12)``; empty for a callable object."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
