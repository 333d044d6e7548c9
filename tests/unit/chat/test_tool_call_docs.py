"""docs/tool-calls.md lists every format, and its code prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

from headwater.chat.parsers import PARSERS

TEXT = (Path(__file__).parents[3] / "docs" / "tool-calls.md").read_text()


def test_every_format_is_listed():
    table = TEXT.split("## Formats")[1].split("## Rules")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == PARSERS.names()


def test_its_code_prints_what_it_shows(capsys):
    examples = re.findall(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", TEXT, flags=re.DOTALL)
    assert len(examples) == 2
    for code, printed in examples:
        exec(compile(code, "docs/tool-calls.md", "exec"), {"__name__": "docs"})
        assert capsys.readouterr().out == re.sub(r"^    ", "", printed, flags=re.MULTILINE)
