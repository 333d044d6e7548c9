from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.config.explain import to_yaml
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
def assert_clashes(problems: Problems) -> Callable[[list[tuple[list[str], str, list[str]]]], None]:
    """The overrides of each case give one problem, which blames a key and its value and has every expected part."""

    def check(cases: list[tuple[list[str], str, list[str]]]) -> None:
        for overrides, blamed, mentions in cases:
            lines = problems(None, *overrides)
            assert len(lines) == 1, f"{overrides}: {lines}"
            assert lines[0].startswith(blamed), f"{overrides}: {lines[0]}"
            for mention in mentions:
                assert mention in lines[0], f"{overrides}: {mention!r} is not in {lines[0]!r}"

    return check


@pytest.fixture
def assert_loads_again(write: Write) -> Callable[[list[list[str]]], None]:
    """The overrides of each case load, and so does the recipe that they resolve to."""

    def check(cases: list[list[str]]) -> None:
        for overrides in cases:
            config = load_config(None, overrides).config
            assert load_config(write("resolved.yaml", to_yaml(config))).config == config, overrides

    return check
