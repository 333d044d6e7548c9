"""Shared by all tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# Test helpers are importable by their path below tests/unit, for example ``algorithms.oracle``.
sys.path.insert(0, str(Path(__file__).parent / "unit"))

# Nothing here may reach a model hub, and two cores are better used without a thread pool per library.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Without a GPU, Triton's interpreter runs our kernels. It must know before anything imports Triton, as torch may.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Ctrl-C is ignored in what a script starts in the background, a closed terminal under nohup, and both by all that
# descends from it; tests send them.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
