"""The examples of docs/tools.md work."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from tools.boxes import ask, call, toolbox

from headwater.config.rollout_schema import ToolsConfig
from headwater.core.registry import known_names
from headwater.tools.config import read_entries

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    files: dict[str, str] = {}
    for name, text in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL):
        files[name] = files.get(name, "") + text
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("run.py")
    assert capsys.readouterr().out.splitlines() == ["Lower.", "Correct.", "{'guess': 0.6}"]
    known, unknown = ask(
        toolbox(config="tools.yaml"),
        call("convert", amount=10, currency="USD"),
        call("convert", amount=10, currency="XYZ"),
    )
    assert known.text == "11.00 USD"
    assert unknown.failure == "raised"
    assert [each.thing for each in read_entries(ToolsConfig(config="servers.yaml"))] == ["mcp"]


def test_the_page_lists_every_built_in_tool():
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Your own function")[0], flags=re.MULTILINE)
    assert sorted(listed) == known_names("headwater.tools")
