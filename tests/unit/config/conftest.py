from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.config.load import load_config
from headwater.core.errors import ConfigError

Write = Callable[[str, str], Path]
Problems = Callable[..., list[str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a recipe into a fresh working directory: ``write("base.yaml", text)``."""
    monkeypatch.chdir(tmp_path)

    def write_recipe(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


@pytest.fixture
def problems() -> Problems:
    """The lines of the ConfigError that a recipe and overrides give: ``problems(path, "run.seed=-1")``."""

    def load_problems(recipe: Path | None, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config(recipe, overrides)
        return list(caught.value.problems)

    return load_problems


@pytest.fixture
def assert_clash(problems: Problems) -> Callable[[list[str], str, list[str]], None]:
    """Overrides give one problem, which blames a key and its value and mentions all that is expected."""

    def check(overrides: list[str], blamed: str, mentions: list[str]) -> None:
        (line,) = problems(None, *overrides)
        assert line.startswith(blamed)
        for mention in mentions:
            assert mention in line

    return check
