"""Shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine must not fail a property test. The same examples are tried every time, so that a failure is one of the
# change that is tested; `pytest --hypothesis-profile explore` looks for new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("headwater", settings.get_profile("explore"), derandomize=True)
settings.load_profile("headwater")

# Test helpers are importable by their path below tests/unit, for example ``algorithms.oracle``.
sys.path.insert(0, str(Path(__file__).parent / "unit"))

# Tests must not reach a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests run in one process per core. More threads per process would only take turns on the same cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU, Triton's interpreter runs our kernels. Set this before anything imports Triton, as torch may.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that a script starts in the background ignore Ctrl-C, and processes under nohup ignore a closed terminal;
# their children inherit that. Some tests send these signals, so restore the default handlers.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

_SESSION = "HEADWATER_TEST_SESSION"
"""An environment variable that every process started by the tests inherits."""
_GRACE_S = 180.0
_TESTS = Path(__file__).parent
_NUM_LINES_AT_ONCE = 12

os.environ.setdefault(_SESSION, uuid.uuid4().hex)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests of a file that share a fixture run in one process, so that it is set up once.

    Files whose slow tests share one name their group themselves, because they also need to be spread evenly.
    """
    for item in items:
        is_placed = item.get_closest_marker("slow") or item.get_closest_marker("xdist_group")
        if not is_placed and _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(_TESTS).as_posix()))


def _shares_a_fixture(item: pytest.Item) -> bool:
    found = getattr(item, "_fixtureinfo", None)
    fixtures = found.name2fixturedefs.values() if found else ()
    return any(each.scope == "module" for definitions in fixtures for each in definitions)


class FailuresAtOnce:
    """Shows the end of a failure when it happens: if a later test hangs, nobody sees the summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome not in ("passed", "skipped"):
            lines = report.longreprtext.splitlines()[-_NUM_LINES_AT_ONCE:]
            head = f"{report.nodeid} ({report.outcome}, {report.when}, {report.duration:.0f} s)"
            self._terminal.write("\n".join(["", head, *lines, ""]))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_collection_finish() -> None:
    """Collect garbage rarely, and only among objects of tests: imports have made half a million others."""
    from headwater.core.interpreter import settle_garbage

    settle_garbage()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a process that the tests started is still running."""
    if (forked := sys.modules.get("forked")) is not None:
        forked.close()
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    deadline = time.monotonic() + _GRACE_S
    while (left := _processes_of_this_session()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        print(f"\nThe tests left {len(left)} processes running:", *left, sep="\n  ")  # noqa: T201
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _processes_of_this_session() -> list[str]:
    mark = f"{_SESSION}={os.environ[_SESSION]}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = mark in (process / "environ").read_bytes().split(b"\0")
            status = (process / "status").read_text()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended, or belongs to another user
            continue
        # multiprocessing's tracker of this process ends together with it.
        is_tracker = "multiprocessing.resource_tracker" in command and f"\nPPid:\t{os.getpid()}\n" in status
        # torch.compile keeps workers, which end with the process that they compile for.
        is_compiler = "_inductor/compile_worker" in command
        if is_ours and not is_tracker and not is_compiler and int(process.name) != os.getpid():
            found.append(f"{process.name}: {command[:200]}")
    return found
