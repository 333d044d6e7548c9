"""Which tools a row offers to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.core.errors import DataError
from headwater.core.registry import nearest

SELECTION = "tool_selection"
"""Entry of a row's ``extra_info`` with the names of its tools; a row without it has all tools."""


@dataclass(frozen=True)
class OfferedTools:
    """The schemas of a run's tools. Unlike the tools themselves, they can be sent to another process."""

    schemas: Mapping[str, Mapping[str, Any]]
    """By the name of the tool, in the order of the settings."""

    def __call__(self, extra_info: Mapping[str, Any], tools_kwargs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The OpenAI function schemas of a row's tools."""
        return [self.schemas[name] for name in self.select(extra_info)]

    def select(self, extra_info: Mapping[str, Any]) -> list[str]:
        """The names of a row's tools."""
        selection = extra_info.get(SELECTION)
        if selection is None:
            return list(self.schemas)
        if not isinstance(selection, Sequence) or isinstance(selection, str):
            raise DataError(f"extra_info.{SELECTION} = {selection!r}: must be a list of tool names")
        for name in selection:
            if name not in self.schemas:
                raise DataError(f"extra_info.{SELECTION} has {name!r}; {nearest(str(name), list(self.schemas))}")
        return [name for name in self.schemas if name in selection]
