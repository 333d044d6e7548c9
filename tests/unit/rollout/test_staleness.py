"""Admission of prompt groups."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.rollout.staleness import RolloutCounts, StalenessManager


def manager(max_concurrent=8, batch_size=4, max_staleness=1):
    return StalenessManager(max_concurrent=max_concurrent, batch_size=batch_size, max_staleness=max_staleness)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 3), st.lists(st.sampled_from("sarv"), max_size=80))
def test_generation_never_runs_further_ahead_than_allowed(max_concurrent, batch_size, max_staleness, events):
    admission, version = manager(max_concurrent, batch_size, max_staleness), 0
    for event in events:
        running = admission.counts.running
        if event == "s" and admission.capacity(version) > 0:
            admission.enqueue()
            admission.start()
        elif event == "a" and running:
            admission.accept()
        elif event == "r" and running:
            admission.reject()
        elif event == "v" and admission.counts.accepted >= (version + 1) * batch_size:
            version += 1
        counts = admission.counts
        assert counts.running <= max_concurrent
        # What is not yet trained on fits in the batches that may be ahead.
        assert counts.accepted + counts.running - version * batch_size <= (max_staleness + 1) * batch_size


def test_a_rejected_group_gives_its_place_back():
    admission = manager(max_concurrent=4, batch_size=4, max_staleness=0)
    for _ in range(4):
        admission.enqueue()
        admission.start()
    assert admission.capacity(0) == 0
    admission.reject()
    assert admission.capacity(0) == 1
    admission.accept()
    assert admission.capacity(0) == 1


def test_a_restart_counts_what_was_taken_and_what_is_buffered():
    admission = manager()
    admission.recover(5, num_buffered=3)
    assert admission.counts == RolloutCounts(accepted=23)
    assert admission.capacity(5) == 5


def test_an_end_without_a_start_is_refused():
    with pytest.raises(ValueError, match="not counted"):
        manager().accept()


def test_threads_do_not_lose_counts():
    admission = manager()

    def work():
        for _ in range(500):
            admission.enqueue()
            admission.start()
            admission.accept()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert admission.counts == RolloutCounts(accepted=2000)


def ran(admission: StalenessManager, count: int) -> StalenessManager:
    """``count`` groups have run and were accepted."""
    for _ in range(count):
        admission.enqueue()
        admission.start()
        admission.accept()
    return admission


def test_an_accepted_group_that_is_found_too_old_gives_its_place_back():
    admission = ran(manager(batch_size=4, max_staleness=0), 4)
    assert admission.capacity(0) == 0
    admission.give_back()
    assert admission.capacity(0) == 1
    assert admission.counts == RolloutCounts(accepted=3, rejected=1)


def test_the_places_of_a_batch_that_was_short_are_used_up():
    admission = ran(manager(batch_size=4, max_staleness=0), 3)
    admission.forfeit(1)
    assert admission.capacity(0) == 0
    # The next version has capacity for exactly one batch.
    assert admission.capacity(1) == 4


def test_no_capacity_for_batches_after_the_last():
    admission = StalenessManager(max_concurrent=100, batch_size=4, max_staleness=2, num_batches=4)
    assert [admission.capacity(version) for version in range(6)] == [12, 16, 16, 16, 16, 16]
    ran(admission, 16)
    assert admission.capacity(50) == 0


def test_too_many_groups_make_the_capacity_negative():
    admission = ran(manager(batch_size=4, max_staleness=1), 8)
    admission.forfeit(2)
    assert admission.capacity(0) == -2
