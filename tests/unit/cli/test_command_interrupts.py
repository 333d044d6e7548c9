"""Ctrl-C while a command imports what it needs."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from headwater.api.site import launched_learner, rank_failures_named
from headwater.cli.process import interruptible
from headwater.cluster import torchrun
from headwater.config.load import load_config
from headwater.core.errors import RankFailed
from headwater.core.interpreter import Interrupts

# A library as numpy is: what is raised while it is imported is lost.
LOSES_INTERRUPTS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException:
    pass
imported = True
"""

# The signal comes when a named module begins to be imported, and a second one where that is asked for.
COMMAND = """
import importlib.abc, os, signal, sys
name, num_signals = sys.argv[1], int(sys.argv[2])
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, module, path, target=None):
        if module == name:
            for _ in range(num_signals):
                os.kill(os.getpid(), signal.SIGINT)
                [None for _ in range(1000)]
sys.meta_path.insert(0, Finder())
from headwater.cli.main import main
sys.exit(main(["config", "--plain"]))
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "loses_interrupts.py").write_text(LOSES_INTERRUPTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "loses_interrupts", raising=False)
    return lambda: importlib.import_module("loses_interrupts").imported


@pytest.mark.parametrize("handled", [interruptible, Interrupts(lambda doing: None).installed])
def test_an_interrupt_within_an_import_comes_after_it(library, handled):
    seen = []

    def work() -> None:
        seen.append(library())
        time.sleep(600)  # one system call, which the signal must end
        seen.append("the interrupt is lost")

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), handled():
        work()
    assert seen == [True]
    assert time.monotonic() - started < 600, "the system call ended by itself"


def test_an_interrupt_that_was_put_off_is_not_lost_at_the_end(library):
    with pytest.raises(KeyboardInterrupt), interruptible():
        library()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_elsewhere_an_interrupt_is_immediate():
    seen = []

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("went on")

    with pytest.raises(KeyboardInterrupt), interruptible():
        work()
    assert seen == []


@pytest.mark.parametrize(("module", "num_signals"), [("headwater.cli.config", 1), ("yaml", 1), ("yaml", 2)])
def test_a_command_that_still_imports_says_no_more_than_interrupted(module, num_signals):
    command = [sys.executable, "-c", COMMAND, module, str(num_signals)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_second_signal_does_not_hide_which_rank_has_ended():
    """The launcher and the watch of ranks both interrupt rank 0, at about the same time."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        with pytest.raises(KeyboardInterrupt), rank_failures_named(lambda: "", is_last=True):
            raise KeyboardInterrupt
        assert all(signal.getsignal(number) is signal.default_int_handler for number in numbers)
        for error in (KeyboardInterrupt(), RankFailed("rank 1: its process has ended")):
            with (
                pytest.raises(RankFailed, match="rank 1: its process has ended"),
                rank_failures_named(lambda: "rank 1: its process has ended", is_last=True),
            ):
                raise error
            for number in numbers:
                os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_launchers_signal_does_not_replace_the_error_that_names_a_rank(monkeypatch):
    """It may come at any moment while the error is on its way to the user, also before the run is closed."""
    error = RankFailed("rank 1: its process has ended")
    group = SimpleNamespace(failure="", has_raised=False, close=lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torchrun, "join", lambda: group)

    def run() -> None:
        with launched_learner(load_config("quickstart").config):
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
            group.failure, group.has_raised = str(error), True
            os.kill(os.getpid(), signal.SIGTERM)
            raise error

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(RankFailed, match=str(error)):
            run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
