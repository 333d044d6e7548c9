"""Benchmarks and examples are not run by every change, so at least the names that they import must exist."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_name_that_a_script_imports_from_us_exists():
    missing = []
    for path in sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "headwater":
                missing += [f"{path.name}: {node.module}.{each.name}" for each in node.names if not _exists(node, each)]
    assert not missing


def _exists(node: ast.ImportFrom, name: ast.alias) -> bool:
    assert node.module is not None
    try:
        module = importlib.import_module(node.module)
        return hasattr(module, name.name) or bool(importlib.import_module(f"{node.module}.{name.name}"))
    except ModuleNotFoundError as error:
        # A kernel's or a client's package may not be installed here; ours always is.
        return not (error.name or "").startswith("headwater")
