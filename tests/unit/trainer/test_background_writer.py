"""Records are written in order while the run continues, and a failed write is never lost."""

from __future__ import annotations

import threading

import pytest

from headwater.trainer.recorder import BackgroundWriter


def test_everything_is_written_in_order():
    writer, written = BackgroundWriter(), []
    for number in range(100):
        writer.put(lambda number=number: written.append(number))
    writer.flush()
    assert written == list(range(100))
    writer.put(lambda: written.append("last"))
    assert writer.close() is None
    assert written[-1] == "last", "close writes what waits"


def test_an_error_is_raised_by_every_later_call_and_nothing_follows_it():
    writer, written, may_fail = BackgroundWriter(), [], threading.Event()

    def fails():
        may_fail.wait(300)
        raise OSError("the disk is gone")

    writer.put(fails)
    writer.put(lambda: written.append("after"))
    may_fail.set()
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            writer.flush()
    with pytest.raises(OSError, match="the disk is gone"):
        writer.put(lambda: written.append("later"))
    assert isinstance(writer.close(), OSError)
    assert written == []


def test_a_file_that_fails_alone_is_an_error_but_the_records_after_it_are_written():
    writer, written = BackgroundWriter(), []

    def fails():
        raise OSError("no such folder")

    writer.put(fails, alone=True)
    writer.put(lambda: written.append("after"))
    writer.settle()
    assert written == ["after"]
    for raises in (writer.check, writer.flush):
        with pytest.raises(OSError, match="no such folder"):
            raises()
    writer.put(lambda: written.append("later"))
    assert isinstance(writer.close(), OSError)
    assert written == ["after", "later"]


def test_a_slow_disk_slows_the_run_down():
    writer, may_write, num_put = BackgroundWriter(), threading.Event(), []

    def produce():
        for number in range(20):
            writer.put(lambda: may_write.wait(300))
            num_put.append(number)

    thread = threading.Thread(target=produce)
    thread.start()
    thread.join(0.3)
    assert len(num_put) < 20
    may_write.set()
    thread.join(300)
    writer.flush()
    assert len(num_put) == 20
    assert writer.close() is None
