"""What a run of code may use, and how it ended."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal

from headwater.config.rollout_schema import SandboxConfig
from headwater.core.errors import HeadwaterError
from headwater.sandbox.inside.confine import Bounds

Status = Literal["ok", "failed", "timed_out", "out_of_memory", "too_much_output", "killed"]
"""How a run ended. `failed`: a non-zero exit status, usually an exception. `timed_out`: the limit of time or of
processor time. `killed`: a signal, too many processes, or the end of the sandbox itself."""


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


class SandboxUnavailable(HeadwaterError):
    """No isolation works on this machine, so code of a model is not run."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run. What is None is as in the settings."""

    timeout_s: float | None = None
    cpu_s: float | None = None
    memory_mib: int | None = None
    max_processes: int | None = None
    max_file_mib: int | None = None
    max_output_kib: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}: must be a positive number")

    def bounds(self, config: SandboxConfig) -> Bounds:
        """The limits with the settings filled in."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        merged = replace(config, **given)
        return Bounds(
            memory_bytes=merged.memory_mib << 20,
            cpu_s=merged.cpu_s,
            timeout_s=merged.timeout_s,
            max_processes=merged.max_processes,
            max_file_bytes=merged.max_file_mib << 20,
            max_output_bytes=merged.max_output_kib << 10,
        )


@dataclass(frozen=True)
class Outcome:
    """How a run of code ended."""

    status: Status
    stdout: str
    stderr: str
    """Ends with the traceback of an exception, which names the line of the code."""
    exit_code: int | None
    """Exit status; negative: the signal that ended the program; None if the sandbox ended it."""
    seconds: float
    detail: str = ""
    """The limit that was exceeded, in words."""
    is_cut: bool = False
    """True if the program wrote more than is kept here."""
    lost_state: bool = False
    """True if a session had to be ended: the next run starts without its variables and files."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"
