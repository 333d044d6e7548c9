"""Jobs start while there is capacity; results and errors reach the consumer."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import pytest

from headwater.core.errors import RolloutFailed, WaitTimeout
from headwater.rollout.dispatcher import AsyncTaskRunner, BatchTaskDispatcher


class Bench:
    """A dispatcher whose jobs are numbers. Each job returns its number, after ``release`` if jobs are held."""

    def __init__(self, tasks: AsyncTaskRunner, capacity: int = 3, **options) -> None:
        self.tasks = tasks
        self.capacity = capacity
        self.is_held = False
        self.started: list[int] = []
        self.num_running = 0
        self.most_running = 0
        self.held: dict[int, asyncio.Event] = {}
        self.errors: dict[int, BaseException] = {}
        self.dispatcher = BatchTaskDispatcher(tasks, self.begin, capacity=self.room, **options)
        self.jobs = iter(range(100, 1000))

    def room(self) -> int:
        return self.capacity - self.num_running

    def begin(self, job: int):
        self.started.append(job)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        return self.work(job)

    async def work(self, job: int) -> int:
        try:
            if self.is_held:
                self.held[job] = asyncio.Event()
                await self.held[job].wait()
            await asyncio.sleep(0)
            if job in self.errors:
                raise self.errors[job]
            return job
        finally:
            self.num_running -= 1

    def draw(self, count: int) -> list[int]:
        return [next(self.jobs) for _ in range(count)]

    def release(self, job: int) -> None:
        self.tasks.call(lambda: self.held[job].set(), "releasing")

    def settle(self) -> None:
        """Let the event loop process everything that is pending."""
        for _ in range(20):
            self.tasks.call(lambda: None, "turning")

    def wait(self, count: int, hard_limit_s: float = 60.0) -> list[int]:
        return self.dispatcher.wait_results(count, lambda: "the test waits", hard_limit_s=hard_limit_s)


@pytest.fixture
def bench():
    with AsyncTaskRunner() as tasks:
        yield lambda **options: Bench(tasks, **options)


def test_the_capacity_is_never_exceeded(bench):
    it = bench(capacity=3)
    it.dispatcher.submit(range(20))
    results: list[int] = []
    while len(results) < 20:
        results += it.wait(1)
    assert sorted(results) == list(range(20))
    assert it.most_running == 3


def test_nothing_is_drawn_beyond_the_capacity(bench):
    it = bench(capacity=3)
    it.is_held = True
    it.dispatcher.open(it.draw)
    it.settle()
    assert it.started == [100, 101, 102]
    it.release(101)
    it.settle()
    assert it.started == [100, 101, 102, 103]
    assert it.dispatcher.num_running == 3


def test_submitted_jobs_start_before_drawn_ones(bench):
    it = bench(capacity=3)
    it.is_held = True
    it.dispatcher.pause()
    it.dispatcher.open(it.draw)
    it.dispatcher.submit([1, 2])
    it.dispatcher.resume()
    it.settle()
    assert it.started == [1, 2, 100]


def test_waiting_jobs_are_visible(bench):
    it = bench(capacity=2)
    it.is_held = True
    it.dispatcher.submit(range(5))
    it.settle()
    assert it.dispatcher.submitted() == [2, 3, 4]
    assert it.dispatcher.num_submitted == 3


def test_more_capacity_is_used_after_a_notification(bench):
    it = bench(capacity=1)
    it.is_held = True
    it.dispatcher.open(it.draw)
    it.settle()
    it.capacity = 3
    it.settle()
    assert it.started == [100]
    it.dispatcher.notify()
    it.settle()
    assert it.started == [100, 101, 102]


def test_an_error_of_a_job_reaches_the_waiter_and_stops_further_starts(bench):
    it = bench(capacity=3)
    it.errors[102] = ValueError("of the job")
    it.dispatcher.open(it.draw)
    with pytest.raises(ValueError, match="of the job"):
        it.wait(1000)
    it.settle()
    started = len(it.started)
    it.dispatcher.notify()
    it.dispatcher.submit([1])
    it.settle()
    assert len(it.started) == started
    assert it.dispatcher.num_running == 0
    with pytest.raises(ValueError, match="of the job"):
        it.wait(1)


def test_an_error_cancels_running_jobs_and_the_first_error_is_raised(bench):
    it = bench(capacity=3)
    it.is_held = True
    it.errors |= {100: ValueError("first"), 101: ValueError("second")}
    it.dispatcher.open(it.draw)
    it.settle()
    it.release(100)
    it.settle()
    assert it.num_running == 0
    with pytest.raises(ValueError, match="first"):
        it.wait(1)


def test_an_error_of_the_draw_reaches_the_waiter_and_what_was_submitted_still_waits(bench):
    def fails(count: int) -> list[int]:
        raise OSError("the file is gone")

    it = bench(capacity=3)
    it.dispatcher.pause()
    it.dispatcher.submit([1, 2])
    it.dispatcher.open(fails)
    it.dispatcher.resume()
    with pytest.raises(OSError, match="the file is gone"):
        it.wait(1)
    assert it.started == []
    assert it.dispatcher.submitted() == [1, 2]


def test_nothing_replaces_cancelled_jobs(bench):
    it = bench(capacity=2)
    it.is_held = True
    it.dispatcher.open(it.draw)
    it.settle()
    it.tasks.close()
    assert it.started == [100, 101]
    with pytest.raises(RolloutFailed, match="cancelled"):
        it.wait(1)


def test_paused_it_starts_nothing_and_lets_finish_what_runs(bench):
    it = bench(capacity=2)
    it.is_held = True
    it.dispatcher.open(it.draw)
    it.settle()
    it.dispatcher.pause()
    it.dispatcher.pause()
    it.release(100)
    assert it.wait(1) == [100]
    it.settle()
    assert it.started == [100, 101]
    it.dispatcher.resume()
    it.settle()
    assert it.started == [100, 101, 102]


def test_paused_it_is_not_idle_so_the_waiter_waits(bench):
    it = bench()
    it.dispatcher.pause()
    with pytest.raises(WaitTimeout, match="the test waits"):
        it.wait(1, hard_limit_s=0.05)


def test_without_jobs_it_is_idle_and_the_waiter_gets_what_there_is(bench):
    it = bench()
    assert it.wait(1) == []
    it.dispatcher.submit([1, 2])
    results: list[int] = []
    while arrived := it.wait(60):
        results += arrived
    assert sorted(results) == [1, 2]


def test_a_draw_that_gives_fewer_says_that_there_are_no_more(bench):
    it = bench(capacity=4)
    few = iter([7, 8])
    it.dispatcher.open(lambda count: [job for job, _ in zip(few, range(count), strict=False)])
    assert sorted(it.wait(3)) == [7, 8]
    assert it.wait(1) == []


def test_without_capacity_and_running_jobs_it_is_idle(bench):
    it = bench(capacity=0)
    it.dispatcher.open(it.draw)
    assert it.wait(1) == []
    assert it.started == []


def test_results_can_be_looked_at_without_being_taken(bench):
    it = bench()
    it.dispatcher.submit([1])
    it.settle()
    assert it.dispatcher.peek_results() == [1]
    assert it.wait(1) == [1]
    assert it.dispatcher.peek_results() == []


def test_jobs_that_begin_together_begin_within_one_start(bench):
    waves: list[list[int]] = []

    @asynccontextmanager
    async def starting():
        before = len(it.started)
        yield
        await asyncio.sleep(0)
        waves.append(it.started[before:])

    it = bench(capacity=3, starting=starting)
    it.dispatcher.submit(range(3))
    assert len(it.wait(3)) == 3
    it.dispatcher.submit(range(3, 5))
    it.settle()
    assert [job for wave in waves for job in wave] == [0, 1, 2, 3, 4]
    assert waves[0] == [0, 1, 2]


def test_capacity_that_appears_while_jobs_start_is_used(bench):
    """The notification arrives while other jobs are being started."""
    is_starting, may_continue = threading.Event(), threading.Event()

    @asynccontextmanager
    async def starting():
        yield
        if not is_starting.is_set():
            is_starting.set()
            await asyncio.to_thread(may_continue.wait, 60)

    it = bench(capacity=1, starting=starting)
    it.is_held = True
    it.dispatcher.open(it.draw)
    assert is_starting.wait(60)
    it.capacity = 2
    it.dispatcher.notify()
    may_continue.set()
    deadline = time.monotonic() + 60
    while len(it.started) < 2 and time.monotonic() < deadline:
        it.settle()
    assert it.started == [100, 101]


def test_a_notification_after_the_last_check_of_an_admission_is_not_lost(bench):
    """The admission has seen no capacity; then there is some, and the notification comes before its end."""
    it = bench(capacity=1)
    it.is_held = True
    look = it.room
    seen = []

    def room() -> int:
        answer = look()
        if it.started and not seen:  # the last check of the first admission
            seen.append(answer)
            it.capacity = 2
            it.dispatcher.notify()
        return answer

    it.dispatcher._capacity = room
    it.dispatcher.submit([1, 2])
    it.settle()
    assert seen == [0]
    assert it.started == [1, 2]


def test_a_job_that_starts_while_the_consumer_looks_is_not_taken_for_the_end_of_all_work(bench):
    """It takes the last capacity between two checks of the consumer: none is left, but there is still work."""
    it = bench(capacity=1)
    it.is_held, room = True, it.room
    consumer, is_looking, has_started = threading.current_thread(), threading.Event(), threading.Event()

    def look() -> int:
        if threading.current_thread() is not consumer:
            is_looking.wait(60)
            return room()
        is_looking.set()
        has_started.wait(60)
        return room()

    def begin(job: int):
        begun = it.begin(job)
        has_started.set()
        return begun

    it.dispatcher._capacity, it.dispatcher._work = look, begin
    it.dispatcher.open(it.draw)

    def release() -> None:
        has_started.wait(60)
        time.sleep(0.1)  # the consumer has looked, and waits
        it.settle()
        it.release(100)

    releasing = threading.Thread(target=release)
    releasing.start()
    assert it.wait(1) == [100]
    releasing.join()
