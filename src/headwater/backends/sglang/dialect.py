"""What differs between versions of SGLang, in one table. From SGLang's documentation and release notes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headwater.core.errors import RolloutFailed


@dataclass(frozen=True)
class Dialect:
    """How to talk to one range of versions."""

    since: tuple[int, int, int]
    """The first version."""
    has_pause_modes: bool
    """``/pause_generation`` takes a mode. Otherwise it always ends the running requests with the tokens they have."""
    has_seeds: bool
    """``sampling_seed`` is a known sampling parameter. It has an effect with ``--enable-deterministic-inference``."""
    info_path: str
    """Where the server tells about itself."""


DIALECTS = (
    Dialect((0, 5, 6), has_pause_modes=True, has_seeds=True, info_path="/server_info"),
    Dialect((0, 5, 4), has_pause_modes=False, has_seeds=True, info_path="/get_server_info"),
    Dialect((0, 5, 0), has_pause_modes=False, has_seeds=False, info_path="/get_server_info"),
)
"""The newest first. A version between two rows speaks the older of the two."""

OLDEST = DIALECTS[-1]
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def dialect_of(version: str) -> Dialect:
    """The row of the table for a version such as ``0.5.6.post2``."""
    found = _VERSION.match(version)
    number = tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    for dialect in DIALECTS:
        if number >= dialect.since:
            return dialect
    oldest = ".".join(map(str, OLDEST.since))
    raise RolloutFailed(f"SGLang {version} is not supported; install SGLang {oldest} or newer for the server")
