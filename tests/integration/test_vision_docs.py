"""The Python code of docs/vision.md runs as printed."""

from __future__ import annotations

import re

import pytest
from command import ROOT
from PIL import Image

TEXT = (ROOT / "docs" / "vision.md").read_text()
# OpenAI's client needs a server and a whole data URL: tests/unit/serving/test_server_media.py makes such calls.
BLOCKS = [code for code in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL) if "from openai" not in code]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a block in a folder with the picture that it opens, and returns its variables."""
    Image.new("RGB", (56, 56), "red").save(tmp_path / "cat.png")
    monkeypatch.chdir(tmp_path)

    def execute(code: str) -> dict:
        names: dict = {"__name__": "docs"}
        exec(compile(code, "docs/vision.md", "exec"), names)
        return names

    return execute


def test_the_page_has_no_other_code():
    assert ["VisionTower" in code or "Engine.load" in code for code in BLOCKS] == [True, True]


def test_the_tokens_and_features_of_a_picture(run):
    (code,) = (code for code in BLOCKS if "VisionTower" in code)
    made = run(code)
    (item,) = made["media"]
    assert len(made["features"].embeddings) == item.num_tokens == 4
    assert len(made["tokens"]) > 4


def test_the_engine_answers_about_a_picture(run):
    (code,) = (code for code in BLOCKS if "Engine.load" in code)
    made = run(code)
    assert made["response"].input_tokens == made["tokens"]
    assert 1 <= len(made["response"].output_tokens) <= 8
