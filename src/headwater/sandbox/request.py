"""A program and what it needs, as it is sent to a cell."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any


@dataclass(frozen=True)
class Request:
    """A program with its input."""

    code: str = ""
    stdin: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Contents of files by their path below the working folder."""

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"file {name!r}: give a path below the working folder of the program")

    @property
    def num_bytes(self) -> int:
        """About how many bytes of the scratch folder this needs."""
        return 4 * (len(self.code) + len(self.stdin) + sum(map(len, self.files.values()))) + 4096 * len(self.files)

    def message(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "stdin": self.stdin,
            "files": {name: _encode(each) for name, each in self.files.items()},
        }


def _encode(contents: str | bytes) -> str:
    raw = contents.encode("utf-8", "surrogatepass") if isinstance(contents, str) else contents
    return base64.b64encode(raw).decode()
