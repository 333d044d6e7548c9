"""The examples of docs/sandbox.md work as printed, and ``headwater doctor --sandbox`` reports."""

from __future__ import annotations

import json
import re

import pytest
from command import ROOT

from headwater.cli.main import main
from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox import Sandbox, SandboxUnavailable

TEXT = (ROOT / "docs" / "sandbox.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def _needs_a_sandbox():
    with Sandbox(SandboxConfig()) as sandbox:
        try:
            sandbox.start()
        except SandboxUnavailable as error:
            pytest.skip(f"NO SANDBOX ON THIS MACHINE: {error}")


def test_the_examples_of_the_page_work():
    examples = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "docs/sandbox.md", "exec"), {"__name__": "__main__"})


def test_the_page_names_the_settings_with_their_defaults():
    config = SandboxConfig()
    for name in ("timeout_s", "cpu_s", "memory_mib", "max_processes", "max_file_mib", "max_output_kib"):
        assert re.search(rf"`sandbox\.{name}`[^|]*\| {getattr(config, name):g} \|", TEXT), name


def test_the_doctor_shows_what_protects_this_machine(capsys):
    assert main(["doctor", "--sandbox", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_safe"]
    assert report["isolation"] in ("bubblewrap", "namespaces", "bubblewrap-single")
    assert len(report["properties"]) == 13
    assert report["milliseconds"] > 0
    assert main(["doctor"]) == 2
    assert "headwater doctor runs/quickstart" in capsys.readouterr().err
