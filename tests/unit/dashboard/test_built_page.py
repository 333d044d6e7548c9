"""The page in the package was built from the sources in ui/: otherwise ``make ui`` was forgotten."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[3]
UI, ASSETS = ROOT / "ui", ROOT / "src" / "headwater" / "dashboard" / "assets"
OUTSIDE_SRC = ("build.mjs", "index.html", "package-lock.json")


def digests(folder: Path, files: list[Path]) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_page_was_built_from_these_sources():
    recorded = json.loads((UI / "built.json").read_text())
    sources = [file for file in (UI / "src").rglob("*") if file.is_file()] + [UI / name for name in OUTSIDE_SRC]
    assert digests(UI, sources) == recorded["sources"], "the sources have changed: make ui"
    built = [file for file in ASSETS.rglob("*") if file.is_file()]
    assert digests(ASSETS, built) == recorded["built"], "the built files are not those of make ui"
