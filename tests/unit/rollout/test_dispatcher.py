"""Jobs start while there is room; results and errors reach whoever waits."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from headwater.core.errors import RolloutFailed, WaitTimeout
from headwater.rollout.dispatcher import BatchTaskDispatcher
from headwater.rollout.task_runner import AsyncTaskRunner


class Bench:
    """A dispatcher whose jobs are numbers; each yields its number when it is let go, or at once."""

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

    def let_go(self, job: int) -> None:
        self.tasks.call(lambda: self.held[job].set(), "letting go")

    def settle(self) -> None:
        """Let the loop do what it has to do by itself."""
        for _ in range(20):
            self.tasks.call(lambda: None, "turning")

    def wait(self, count: int, hard_limit_s: float = 5.0) -> list[int]:
        return self.dispatcher.wait_results(count, lambda: "the test waits", hard_limit_s=hard_limit_s)


@pytest.fixture
def bench():
    with AsyncTaskRunner() as tasks:
        yield lambda **options: Bench(tasks, **options)


def test_never_more_run_than_there_is_room_for(bench):
    it = bench(capacity=3)
    it.dispatcher.submit(range(20))
    results: list[int] = []
    while len(results) < 20:
        results += it.wait(1)
    assert sorted(results) == list(range(20))
    assert it.most_running == 3


def test_nothing_is_drawn_beyond_the_room_there_is(bench):
    it = bench(capacity=3)
    it.is_held = True
    it.dispatcher.open(it.draw)
    it.settle()
    assert it.started == [100, 101, 102]
    it.let_go(101)
    it.settle()
    assert it.started == [100, 101, 102, 103]
    assert it.dispatcher.num_running == 3


def test_what_was_submitted_goes_before_what_is_drawn(bench):
    it = bench(capacity=3)
    it.is_held = True
    it.dispatcher.pause()
    it.dispatcher.open(it.draw)
    it.dispatcher.submit([1, 2])
    it.dispatcher.resume()
    it.settle()
    assert it.started == [1, 2, 100]


def test_what_waits_for_room_can_be_seen(bench):
    it = bench(capacity=2)
    it.is_held = True
    it.dispatcher.submit(range(5))
    it.settle()
    assert it.dispatcher.submitted() == [2, 3, 4]
    assert it.dispatcher.num_submitted == 3


def test_more_room_is_used_when_it_is_told_of_it(bench):
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


def test_an_error_cancels_what_still_runs_and_the_first_is_told(bench):
    it = bench(capacity=3)
    it.is_held = True
    it.errors |= {100: ValueError("first"), 101: ValueError("second")}
    it.dispatcher.open(it.draw)
    it.settle()
    it.let_go(100)
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


def test_nothing_starts_in_the_place_of_what_was_called_off(bench):
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
    it.let_go(100)
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
    while arrived := it.wait(5):
        results += arrived
    assert sorted(results) == [1, 2]


def test_a_draw_that_gives_fewer_says_that_there_are_no_more(bench):
    it = bench(capacity=4)
    few = iter([7, 8])
    it.dispatcher.open(lambda count: [job for job, _ in zip(few, range(count), strict=False)])
    assert sorted(it.wait(3)) == [7, 8]
    assert it.wait(1) == []


def test_without_room_and_with_nothing_that_runs_it_is_idle(bench):
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


def test_room_that_appears_while_jobs_start_is_not_overlooked(bench):
    """The look that finds it comes while others are being started; it must not be forgotten."""
    is_starting, may_go_on = threading.Event(), threading.Event()

    @asynccontextmanager
    async def starting():
        yield
        if not is_starting.is_set():
            is_starting.set()
            await asyncio.to_thread(may_go_on.wait, 5)

    it = bench(capacity=1, starting=starting)
    it.is_held = True
    it.dispatcher.open(it.draw)
    is_starting.wait(5)
    it.capacity = 2
    it.dispatcher.notify()
    may_go_on.set()
    for _ in range(200):
        it.settle()
        if len(it.started) == 2:
            break
    assert it.started == [100, 101]


def test_a_look_between_the_last_check_for_room_and_its_end_is_not_lost(bench):
    """Admission has just seen that there is no room; then there is, and the notice comes before it has ended."""
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
    """It takes the last room between two looks of the consumer: there is none left then, and yet there is work."""
    it = bench(capacity=1)
    it.is_held, room = True, it.room
    consumer, is_looking, has_started = threading.current_thread(), threading.Event(), threading.Event()

    def look() -> int:
        if threading.current_thread() is not consumer:
            is_looking.wait(5)
            return room()
        is_looking.set()
        has_started.wait(5)
        return room()

    def begin(job: int):
        begun = it.begin(job)
        has_started.set()
        return begun

    it.dispatcher._capacity, it.dispatcher._work = look, begin
    it.dispatcher.open(it.draw)
    letting_go = threading.Timer(0.2, lambda: it.let_go(100))
    letting_go.start()
    assert it.wait(1) == [100]
    letting_go.join()
