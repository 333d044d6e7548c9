"""The shape of the code: who may import whom, and how light importing is."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from headwater.core.registry import known_names

pytestmark = pytest.mark.xdist_group("structure")  # one process parses all files once

SOURCE = Path(__file__).parents[2] / "src" / "headwater"

ORDER = [
    "core", "config", "observe", "chat", "data", "models", "algorithms", "sandbox", "tools", "rewards", "weights",
    "engine", "serving", "backends", "workflows", "rollout", "learner", "cluster", "trainer", "planner",
    "api", "dashboard", "cli",
]  # fmt: skip
FORBIDDEN = {
    "learner": {"engine"},
    "trainer": {"engine", "serving"},
    "dashboard": set(ORDER) - {"core", "config", "observe", "dashboard"},
}
ONLY_IN = {"ray": "cluster/ray", "vllm": "backends/vllm", "sglang": "backends/sglang"}
"""Packages that only files whose path begins like this may import."""

IN_THE_API = {"Config", "Engine", "Trainer"}
"""Classes of ``headwater.api`` with the name of what they wrap, which users of the package do not see."""

ONE_NAME_ONE_FILE = {
    "algorithms/advantages", "algorithms/corrections", "algorithms/policy_losses", "backends", "chat/parsers", "cli",
    "data/tasks", "observe/trackers", "rewards/managers", "rewards/scorers", "tools", "workflows",
}  # fmt: skip
MODULE_NAME = re.compile(r"headwater(\.\w+)+")
NAMES_HIGHER_ONES = {"core/stand_ins.py", "backends/native/places.py"}
"""Files with names of modules as strings; docs/structure.md says why."""
RUN_APART = "sandbox/inside"
"""Its files are given to another process one by one."""
SHORT, LONG = 100, 400
"""Lines. A shorter file belongs in its only importer, unless that would become longer than ``LONG``."""
OWN_SUBJECT = {
    "dashboard/ledger_view.py": "an answer of its own, with texts; the importer is the list of all answers",
    "dashboard/settings.py": "likewise",
    "learner/wide_layers.py": "precision of the layers; the importer places them on ranks",
}
"""Short files that stay beside their only importer, and why."""


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


def test_every_folder_of_code_comes_with_a_wheel():
    """setuptools leaves out folders without ``__init__.py``."""
    folders = {path.parent for path in files()}
    assert not {str(each) for each in folders if not (each / "__init__.py").is_file()}


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


def test_names_of_higher_folders_in_strings_are_those_of_plugins():
    for path in files():
        name = path.relative_to(SOURCE)
        if len(name.parts) == 1 or str(name) in NAMES_HIGHER_ONES:
            continue
        higher = set(ORDER[ORDER.index(name.parts[0]) + 1 :])
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
                _, folder, *rest = node.value.split(".")
                is_plugins = "/".join([folder, *rest]) in ONE_NAME_ONE_FILE
                assert folder not in higher or is_plugins, f"{name}: {name.parts[0]} must not name {node.value}"


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


def test_the_trainer_reaches_the_engine_only_through_its_interface():
    """``FORBIDDEN`` keeps it from importing ``engine``."""
    for path in (SOURCE / "trainer").glob("*.py"):
        modules = imported_modules(path)
        if path.name != "rollout_setup.py":  # it makes the engine
            wrong = {each for each in modules if each.startswith("headwater.backends")}
            assert not wrong, f"{path}: only what makes the engine imports {wrong}"
        assert "type: ignore[attr-defined]" not in path.read_text(), f"{path}: calls what is in no protocol"


def test_only_a_backend_itself_knows_its_name():
    """Others read its ``BackendTraits`` or the engine's ``Capabilities``."""
    names = set(known_names("headwater.backends"))
    assert {"embedded", "vllm"} <= names
    for path in files():
        folder = path.relative_to(SOURCE).parts[0]
        for node in ast.walk(tree(path)) if folder != "backends" else ():
            if isinstance(node, ast.Compare):
                compared = {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node)}
                texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                wrong = names & texts if "backend" in compared else set()
                assert not wrong, f"{path}:{node.lineno}: add a trait instead of a comparison with {wrong}"


def test_no_module_imports_itself_through_others():
    """Imports inside functions and for type checkers count too: a cycle is one whenever it is closed."""
    modules = {_module_name(path): path for path in files()}
    imports = {name: imported_modules(path) & modules.keys() - {name} for name, path in modules.items()}
    # Remove the modules that import nothing that is left; what cannot be removed is on a cycle or imports one.
    while leaves := {name for name, imported in imports.items() if not imported & imports.keys()}:
        imports = {name: imported for name, imported in imports.items() if name not in leaves}
    assert not imports, f"on an import cycle, or importing one: {sorted(imports)}"


def test_a_short_file_with_one_importer_is_part_of_it():
    """A file that needs another optional package than its importer stays apart, and ``__init__`` is no importer."""
    modules = {_module_name(path): path for path in files()}
    importers: dict[Path, list[Path]] = {path: [] for path in files()}
    for path in files():
        for name in imported_modules(path) & modules.keys():
            importers[modules[name]].append(path)
    lines = {path: len(path.read_text().splitlines()) for path in files()}
    short = {}
    for path, (importer, *others) in ((path, found) for path, found in importers.items() if found):
        folder = str(path.parent.relative_to(SOURCE))
        if folder in ONE_NAME_ONE_FILE or folder == RUN_APART or "__init__.py" in (path.name, importer.name):
            continue
        needs_triton = "triton" in imported_modules(path) - imported_modules(importer)
        is_alone = not others and importer.parent == path.parent and lines[path] < SHORT
        if is_alone and not needs_triton and lines[path] + lines[importer] <= LONG:
            short[str(path.relative_to(SOURCE))] = importer.name
    parts = {name: importer for name, importer in short.items() if name not in OWN_SUBJECT}
    assert not parts, f"move what is in the first file to the second one: {parts}"
    assert OWN_SUBJECT.keys() <= short.keys(), "a file that is listed here needs no reason any more"


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
