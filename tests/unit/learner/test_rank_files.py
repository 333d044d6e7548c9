"""Ranks that tell each other through files that they have written their part of a checkpoint."""

from __future__ import annotations

import shutil
import threading

import pytest

from headwater.cluster.group import RanksWriting
from headwater.core.errors import DiskFull, RankFailed, RunError
from headwater.learner import rank_files
from headwater.learner.rank_files import clear_reports, reporting, see_folder, wait_for_ranks


def test_the_first_rank_continues_when_all_have_written(tmp_path):
    done: list[int] = []

    def write(rank: int) -> None:
        with reporting(tmp_path, rank):
            (tmp_path / f"part {rank}").write_text("weights")
            done.append(rank)

    threads = [threading.Timer(0.2 * rank, write, [rank]) for rank in (1, 2)]
    for each in threads:
        each.start()
    wait_for_ranks(tmp_path, [1, 2])
    assert sorted(done) == [1, 2]
    clear_reports(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part 1", "part 2"]


def test_an_error_of_a_rank_is_raised_where_it_is_awaited(tmp_path):
    with reporting(tmp_path, 1):
        raise DiskFull("/runs: the disk is full", needed_bytes=12)
    with pytest.raises(DiskFull, match="rank 1: /runs: the disk is full") as caught:
        wait_for_ranks(tmp_path, [1])
    assert caught.value.needed_bytes == 12
    with reporting(tmp_path, 2):
        raise RunError("no permission")
    with pytest.raises(RunError, match="rank 2: no permission"):
        wait_for_ranks(tmp_path, [2])
    (tmp_path / ".rank_00003.json").touch()  # a full disk takes an empty file, but nothing in it
    with pytest.raises(RunError, match="rank 3: it could not even write its error"):
        wait_for_ranks(tmp_path, [3])


def test_a_rank_that_ends_or_a_folder_that_is_removed_ends_the_wait(tmp_path, monkeypatch):
    class Ended:
        failure = "rank 1 of 2: its process has ended"

    folder = tmp_path / ".step_000004"
    folder.mkdir()
    with pytest.raises(RankFailed, match="step_000004 is incomplete: rank 1 of 2: its process has ended"):
        RanksWriting(folder, Ended()).write()
    threading.Timer(0.3, lambda: shutil.rmtree(folder)).start()
    with pytest.raises(RunError, match="was removed while ranks wrote"):
        wait_for_ranks(folder, [1])
    with reporting(folder, 1):
        pass  # nobody waits for it any more
    assert not folder.exists()
    monkeypatch.setattr(rank_files, "_SHARED_S", 0.1)
    with pytest.raises(RunError, match=r"run\.root must be a folder that the machines of all learner ranks share"):
        see_folder(folder)
