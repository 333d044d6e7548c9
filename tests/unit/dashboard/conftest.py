"""One run and one server for the tests that only read."""

from __future__ import annotations

import pytest
from dashboard.parts import make_run, served


@pytest.fixture(scope="package")
def runs_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    make_run(root, "first")
    make_run(root, "sec ond/2".replace("/", "-"), 2, ["learner.learning_rate=0.5"])
    (root / "no run").mkdir()
    (root / "file.txt").write_text("x")
    return root


@pytest.fixture(scope="package")
def client(runs_dir):
    with served(runs_dir) as client:
        yield client
