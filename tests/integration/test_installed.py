"""A wheel has everything that the commands need, outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from command import CUT_DOWN, PROCESS_LIMIT_S, ROOT, metrics

SHORT = [each for each in CUT_DOWN if not each.startswith("reward.function")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs the command of an installed wheel: ``installed(folder, "recipes")``."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src" / "headwater", folder / "src" / "headwater")
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True, timeout=PROCESS_LIMIT_S)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    # The dependencies are those of this environment. PYTHONPATH comes before an editable installation in it.
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "PYTHONSAFEPATH": "1"}

    def run(where, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "headwater", *arguments],
            cwd=where, env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_recipes_come_with_the_package(installed, tmp_path):
    assert "\n  dapo " in installed(tmp_path, "recipes")
    (tmp_path / "my.yaml").write_text("extends: [quickstart, dapo]\nrun: {name: my}\n")
    shown = installed(tmp_path, "config", "my.yaml", "--plain")
    assert "train:\n  - largest_digit" in shown
    assert "filter_groups: true" in shown


@pytest.mark.slow
def test_a_run_is_made_resumed_and_evaluated_outside_the_repository(installed, tmp_path):
    installed(tmp_path, "train", "quickstart", "rloo", *SHORT)
    run = tmp_path / "runs" / "quickstart"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    installed(elsewhere, "train", "--resume", str(run), "trainer.total_steps=3")
    assert [each["step"] for each in metrics(run, "train")] == [1, 2, 3]
    assert "mean reward" in installed(elsewhere, "eval", str(run))
    assert not any(elsewhere.iterdir())
