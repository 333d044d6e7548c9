"""docs/workflows.md tells of every workflow and argument, and its code runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from headwater.workflows import WORKFLOWS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "workflows.md").read_text()


@pytest.mark.parametrize("name", WORKFLOWS.names())
def test_every_argument_is_named_with_its_default(name):
    section = TEXT.split(f"\n## `{name}`\n")[1].split("\n## ")[0]
    for parameter in list(inspect.signature(WORKFLOWS.resolve(name)).parameters.values())[1:]:
        default = "a sentence" if isinstance(parameter.default, str) else str(parameter.default)
        assert f"| `{parameter.name}` | {default} |" in section


def test_its_test_of_a_workflow_passes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(code, "docs/workflows.md", "exec"), {"__name__": "docs"})
