"""docs/workflows.md describes every workflow and argument, and its code runs."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path

from endpoint_parts import KeyedEngine, episode

from headwater.workflows import WORKFLOWS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "workflows.md").read_text()
ENDPOINT = (ROOT / "docs" / "endpoint.md").read_text()


def test_every_argument_is_named_with_its_default():
    for name in set(WORKFLOWS.names()) - {"endpoint"}:
        section = TEXT.split(f"\n## `{name}`\n")[1].split("\n## ")[0]
        for parameter in list(inspect.signature(WORKFLOWS.resolve(name)).parameters.values())[1:]:
            text = "a sentence" if parameter.default else "a path"
            default = text if isinstance(parameter.default, str) else str(parameter.default)
            assert f"| `{parameter.name}` | {default} |" in section, f"{name}: {parameter.name}"


def test_every_argument_of_the_endpoint_is_named_with_its_default():
    for parameter in list(inspect.signature(WORKFLOWS.resolve("endpoint")).parameters.values())[1:]:
        default = f"`{parameter.default}`" if isinstance(parameter.default, str) else parameter.default
        text = "none" if parameter.default in ("", None, ()) else default
        assert f"| `{parameter.name}` | {text} |" in ENDPOINT, parameter.name


def test_the_first_agent_of_the_endpoint_page_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", ENDPOINT, flags=re.DOTALL)
    (tmp_path / "my_agent.py").write_text(code)
    (one,) = asyncio.run(episode("", KeyedEngine(["9", "46"]), agent=f"{tmp_path}/my_agent.py:solve"))
    assert (one.reward, one.info["num_turns"]) == (1.0, 2)


def test_its_code_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for code in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(compile(code, "docs/workflows.md", "exec"), {"__name__": "docs"})


def test_the_printed_rlvr_is_the_real_one():
    printed = re.search(r"    (async def rlvr\(episode\):\n(?:        .*\n)+)", TEXT)[1]
    source = inspect.getsource(WORKFLOWS.resolve("rlvr"))
    assert [line.strip() for line in printed.splitlines()[1:]] == [line.strip() for line in source.splitlines()[2:]]
