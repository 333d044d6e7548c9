"""Names of signals."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """For example ``SIGKILL``. Most real-time signals have no name: ``signal 35``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
