"""Benchmarks are scripts, not a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a benchmark by name, and forgets it and what it brought afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    ours = {path.stem for path in BENCHMARKS.glob("*.py")}
    for name in (set(sys.modules) - before) & ours:
        del sys.modules[name]
