"""``manifest.json``: the size and checksum of every file of a folder, so that damage is found before it is used.

    seal(folder)                      # the last file that is written
    problems = damage(folder)         # () if every file is as it was saved

A file's checksum is a BLAKE2b hash over the hashes of its pieces, which several threads compute at the same time. It
finds accidents, not a deliberate change: whoever can write the files can also write the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"

_FORMAT = "headwater-manifest-1"
_PIECE_BYTES = 16 * 2**20
_DIGEST_BYTES = 16
_MAX_THREADS = 16
_READ_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json", ".jinja", ".model", ".py")


@dataclass(frozen=True)
class Damage:
    """One file that is not as it was saved."""

    file: Path
    what: str
    """In words, such as ``has 10 bytes, not 20``."""

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


def seal(folder: Path) -> None:
    """Write the manifest of all files in ``folder``. Call it when they are complete."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    sizes = {path: path.stat().st_size for path in files}
    digests = _digests(sizes)
    entries = {path.relative_to(folder).as_posix(): {"bytes": sizes[path], "blake2b": digests[path]} for path in files}
    content = {"format": _FORMAT, "piece_bytes": _PIECE_BYTES, "files": entries}
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=1)
    temporary = folder / f".{MANIFEST}"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / MANIFEST)


def damage(folder: Path, *, part: str = "", contents: bool = True) -> tuple[Damage, ...]:
    """The files that are missing or differ from the manifest.

    Only files below the sub-folder ``part`` are checked if it is given. Without ``contents``, only sizes are compared,
    which reads nothing but the manifest. Of the files that the manifest does not name, those are found that loading a
    model could read, such as other weights; notes and pictures are ignored.
    """
    try:
        entries = _read(folder / MANIFEST)
    except FileNotFoundError:
        return (Damage(folder / MANIFEST, "is missing, so the folder is incomplete or of an earlier version"),)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return (Damage(folder / MANIFEST, f"is damaged ({error})"),)
    wanted = {folder / name: entry for name, entry in entries.items() if not part or name.startswith(f"{part}/")}
    found: list[Damage] = []
    whole: dict[Path, int] = {}
    for path, entry in wanted.items():
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            found.append(Damage(path, f"cannot be read ({error.strerror or error})"))
            continue
        if size is None:
            found.append(Damage(path, "is missing"))
        elif size != entry["bytes"]:
            found.append(Damage(path, f"has {size} bytes, not {entry['bytes']}"))
        else:
            whole[path] = size
    found += [
        Damage(path, "was added after the folder was saved, and loading the model could read it: move it away")
        for path in sorted(_readable_files(folder / part) - wanted.keys())
    ]
    if contents:
        try:
            digests = _digests(whole)
        except OSError as error:
            broken = Path(error.filename) if error.filename else folder
            return (*found, Damage(broken, f"cannot be read ({error.strerror or error})"))
        changed = (path for path in whole if digests[path] != wanted[path]["blake2b"])
        found += [Damage(path, "has another checksum than when it was saved: it was changed") for path in changed]
    return tuple(found)


def num_bytes(folder: Path) -> int:
    """The size of all files in ``folder``. A file that disappears meanwhile does not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _readable_files(folder: Path) -> set[Path]:
    """The files that loading a model or a checkpoint may read, by their names."""
    found = (path for path in folder.rglob("*") if path.suffix in _READ_SUFFIXES and path.name != MANIFEST)
    return {path for path in found if not path.name.startswith(".") and path.is_file()}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"it is not in the format {_FORMAT}")
    if content.pop("checksum", None) != _checksum(content) or content["piece_bytes"] != _PIECE_BYTES:
        raise ValueError("it was changed after it was written")
    files: dict[str, dict[str, Any]] = content["files"]
    for name, entry in files.items():
        if set(entry) != {"bytes", "blake2b"} or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"its entry {name!r} is not one of a file in this folder")
    return files


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _digests(sizes: Mapping[Path, int]) -> dict[Path, str]:
    """The checksum of every file. Pieces of all files are hashed at the same time: hashing releases Python's lock."""
    pieces = [
        (path, start, min(_PIECE_BYTES, size - start))
        for path, size in sizes.items()
        for start in range(0, size, _PIECE_BYTES)
    ]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        hashed = list(pool.map(_piece, pieces))
    whole = {path: hashlib.blake2b(digest_size=_DIGEST_BYTES) for path in sizes}
    for (path, *_), digest in zip(pieces, hashed, strict=True):
        whole[path].update(digest)
    return {path: each.hexdigest() for path, each in whole.items()}


def _piece(piece: tuple[Path, int, int]) -> bytes:
    path, start, length = piece
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(length), digest_size=_DIGEST_BYTES).digest()
