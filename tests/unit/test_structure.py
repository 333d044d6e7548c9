"""The shape of the code: who may import whom, and how light importing is."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("structure")  # one process parses all files once

SOURCE = Path(__file__).parents[2] / "src" / "headwater"

ORDER = [
    "core", "config", "observe", "chat", "data", "models", "algorithms", "sandbox", "tools", "rewards", "weights",
    "engine", "serving", "backends", "workflows", "rollout", "learner", "cluster", "trainer", "planner",
    "api", "dashboard", "cli",
]  # fmt: skip
FORBIDDEN = {
    "learner": {"engine"},
    "dashboard": set(ORDER) - {"core", "config", "observe", "dashboard"},
}
ONLY_IN = {"ray": "cluster/ray", "vllm": "backends/vllm", "sglang": "backends/sglang"}
"""Packages that only files whose path begins like this may import."""

IN_THE_API = {"Config", "Engine", "Trainer"}
"""Classes of ``headwater.api`` with the name of what they wrap, which users of the package do not see."""


@cache
def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            found.add(node.module or "")
            # `from headwater.core import waits` imports a module too.
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_every_folder_has_a_place_in_the_order():
    folders = {path.name for path in SOURCE.iterdir() if any(path.glob("*.py"))}
    assert folders <= set(ORDER)


def test_imports_flow_one_way():
    for path in files():
        folder = path.relative_to(SOURCE).parts[0]
        if folder.endswith(".py"):
            continue
        allowed = set(ORDER[: ORDER.index(folder) + 1]) - FORBIDDEN.get(folder, set())
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "headwater" and len(parts) > 1:
                assert parts[1] in allowed, f"{path}: {folder} must not import {module}"
            elif parts[0] in ONLY_IN:
                assert str(path.relative_to(SOURCE)).startswith(ONLY_IN[parts[0]]), (
                    f"{path}: must not import {parts[0]}"
                )


def test_who_keeps_a_process_alive_does_not_know_how_to_talk_to_it():
    for path in (SOURCE / "backends" / "launch").glob("*.py"):
        wrong = {name for name in imported_modules(path) if name.startswith(("headwater.backends.native", "aiohttp"))}
        assert not wrong, f"{path}: must not import {wrong}"


def test_the_trainer_reaches_the_learner_only_through_its_interface():
    found = {path.name: imported_modules(path) for path in (SOURCE / "trainer").glob("*.py")}
    reaching = {
        name for name, modules in found.items() if any(each.startswith("headwater.learner") for each in modules)
    }
    assert reaching == {"learner_setup.py"}, "only what builds the learner imports its package"


def test_no_module_imports_itself_through_others():
    """Imports inside functions and for type checkers count too: a cycle is one whenever it is closed."""
    modules = {_module_name(path): path for path in files()}
    imports = {name: imported_modules(path) & modules.keys() - {name} for name, path in modules.items()}
    # Remove the modules that import nothing that is left; what cannot be removed is on a cycle or imports one.
    while leaves := {name for name, imported in imports.items() if not imported & imports.keys()}:
        imports = {name: imported for name, imported in imports.items() if name not in leaves}
    assert not imports, f"on an import cycle, or importing one: {sorted(imports)}"


def _module_name(path: Path) -> str:
    parts = ("headwater", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_a_public_class_name_means_one_thing():
    """The dashboard counts too. Adapters have the names of the framework that they stand in for."""
    places: dict[str, list[str]] = {}
    for path in files():
        name = str(path.relative_to(SOURCE))
        if not name.startswith("workflows/adapters/"):
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in IN_THE_API:
                    places.setdefault(node.name, []).append(name)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, f"rename the more local one: {twice}"


def test_the_documented_faces_have_all_their_calls():
    documented = (SOURCE.parents[1] / "docs" / "structure.md").read_text()
    faces = {"InferenceEngine": "core/protocols.py", "Learner": "core/learner.py", "Episode": "workflows/episode.py"}
    for face, path in faces.items():
        (row,) = [line for line in documented.splitlines() if line.startswith(f"| `{face}` (`{path}`)")]
        (body,) = [
            node.body for node in tree(SOURCE / path).body if isinstance(node, ast.ClassDef) and node.name == face
        ]
        calls = {
            node.name
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
            # An episode's properties only describe it.
            and not (face == "Episode" and node.decorator_list)
        }
        missing = {name for name in calls if f"`{name}`" not in row}
        assert calls, face
        assert not missing, f"docs/structure.md lacks calls of {face}: {sorted(missing)}"


@pytest.mark.parametrize(
    "module", ["headwater", "headwater.core.records", "headwater.config.load", "headwater.cli.main"]
)
def test_importing_is_light(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_takes_little_processor_time():
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "headwater.cli.main", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 1.0
