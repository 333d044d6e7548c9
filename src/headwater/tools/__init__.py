"""Tools that a model may call, one file each. See docs/tools.md.

A tool is a ``BaseTool``, a class with the same methods, or a plain function with type hints and a docstring.
"""

from __future__ import annotations

from headwater.core.registry import Registry
from headwater.tools.base import BaseTool, ToolError, ToolResponse, ToolUnavailable

__all__ = ["TOOLS", "BaseTool", "ToolError", "ToolResponse", "ToolUnavailable"]

TOOLS = Registry("tool", "headwater.tools")
