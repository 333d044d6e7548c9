"""The code in docs/agents.md runs, and its tables name what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from headwater.core.tool_calls import ToolFailure
from headwater.workflows.tool_agent import EndedBy

TEXT = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()


def test_its_code_runs():
    names: dict[str, object] = {"__name__": "docs"}
    for code in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(compile(code, "docs/agents.md", "exec"), names)
    assert "second" in names


def test_every_failure_and_every_end_is_named():
    for name in (*get_args(ToolFailure), *get_args(EndedBy)):
        assert f"`{name}`" in TEXT, name
