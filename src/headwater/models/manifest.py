"""A list of a folder's files with sizes and SHA-256 sums, to tell a whole folder from a damaged one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

MANIFEST = "headwater_manifest.json"


def write_manifest(folder: Path, source: str) -> None:
    """Describe every file of ``folder`` as it now is on the disk; ``source`` says where the folder came from."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n", encoding="utf-8")


def find_damage(folder: Path, *, read_contents: bool) -> str:
    """What is wrong with ``folder``, or an empty string. Without ``read_contents`` only sizes are compared."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if read_contents and sha256_of(path) != digest:
            return f"{name} has other contents than when it was saved"
    return ""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
