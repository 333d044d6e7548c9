"""One thread runs all episodes: calls, posted functions, and its end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headwater.rollout.dispatcher import AsyncTaskRunner


@pytest.fixture
def tasks():
    with AsyncTaskRunner() as runner:
        yield runner


def test_a_coroutine_runs_on_a_separate_thread(tasks):
    async def where() -> str:
        return threading.current_thread().name

    assert tasks.start(where()).result(60) == "headwater-rollouts"
    assert threading.current_thread().name != "headwater-rollouts"


def test_cancelling_the_future_cancels_the_coroutine(tasks):
    started, ended = threading.Event(), threading.Event()

    async def sleeps():
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    future = tasks.start(sleeps())
    started.wait(60)
    future.cancel()
    assert ended.wait(60)


def test_a_call_returns_what_the_function_returns_and_raises_what_it_raises(tasks):
    assert tasks.call(lambda: threading.current_thread().name, "asking") == "headwater-rollouts"
    with pytest.raises(ZeroDivisionError):
        tasks.call(lambda: 1 / 0, "dividing")


def test_a_call_from_the_thread_itself_does_not_wait_for_itself(tasks):
    assert tasks.call(lambda: tasks.call(lambda: 7, "inner"), "outer") == 7


def test_what_is_posted_runs_before_what_is_called_later(tasks):
    order = []
    tasks.post(lambda: order.append("posted"))
    tasks.call(lambda: order.append("called"), "in order")
    assert order == ["posted", "called"]


def test_closing_ends_what_runs_and_the_thread():
    ended = []

    async def sleeps(number: int):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    tasks = AsyncTaskRunner()
    for number in range(3):
        tasks.start(sleeps(number))
    tasks.call(lambda: None, "letting them begin")
    tasks.close()
    assert sorted(ended) == [0, 1, 2]
    assert not tasks.is_open
    assert not tasks.is_alive


def test_what_episodes_have_used_is_cleaned_up_after_them():
    order = []

    async def episode():
        try:
            await asyncio.sleep(3600)
        finally:
            order.append("episode")

    async def broken():
        order.append("broken")
        raise OSError("cannot close")

    async def clean_up():
        order.append("clean up")

    tasks = AsyncTaskRunner()
    for each in (broken, clean_up):
        tasks.at_end(each)
    tasks.start(episode())
    tasks.call(lambda: None, "starting")
    tasks.close()
    tasks.close()
    assert order == ["episode", "broken", "clean up"]


def test_a_second_close_has_no_effect():
    tasks = AsyncTaskRunner()
    tasks.close()
    tasks.close()
    assert not tasks.is_open


def test_an_episode_that_suppresses_a_cancellation_is_cancelled_again():
    suppressed = []

    async def stubborn():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            suppressed.append("once")
        await asyncio.sleep(60)

    tasks = AsyncTaskRunner()
    tasks.start(stubborn())
    tasks.call(lambda: None, "letting it begin")
    tasks.close()
    assert suppressed == ["once"]
    assert not tasks.is_alive


def test_what_an_episode_starts_while_it_is_cancelled_ends_too():
    ended = []

    async def second():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("second")

    async def first():
        try:
            await asyncio.sleep(60)
        finally:
            children.append(asyncio.ensure_future(second()))
            await asyncio.sleep(0)

    children: list[asyncio.Task] = []
    tasks = AsyncTaskRunner()
    tasks.start(first())
    tasks.call(lambda: None, "letting it begin")
    tasks.close()
    assert ended == ["second"]
