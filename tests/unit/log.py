"""What the package has logged during a test."""

from __future__ import annotations

import logging

import pytest


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without those of libraries: asyncio, for example, complains about what an earlier test has left when that is
    collected as garbage."""
    return [record for record in caplog.records if record.name.partition(".")[0] == "headwater"]
