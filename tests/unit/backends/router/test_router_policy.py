"""Which server gets a request."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.backends.router.policy import Policy

NAMES = ("a", "b", "c", "d")
SESSIONS = ("", "s0", "s1", "s2", "s3", "s4", "s5")


class Routing(RuleBasedStateMachine):
    """Random servers, requests, drains, deaths and weight updates, against what a router must guarantee."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy(max_sessions=4, overload_lead=2)
        self.capacity: dict[str, int] = {}
        self.version: dict[str, int] = {}
        self.is_open: dict[str, bool] = {}
        self.placed: dict[int, tuple[str, str]] = {}
        self.waiting: dict[int, str] = {}
        self.own: dict[int, int] = {}
        """The newest version of the tokens that a request had when it came."""
        self.seen: dict[str, int] = {}
        """The newest version that each session has seen."""
        self.newest = 0
        self.count = 0

    def take_placed(self) -> None:
        for key, name in self.policy.take_placed():
            self.place(key, self.waiting.pop(key), name)

    def place(self, key: int, session: str, name: str) -> None:
        assert self.is_open[name], "a closed server gets no requests"
        # A session that was forgotten may only go back if no open server has what it saw.
        best = max(self.version[each] for each in self.is_open if self.is_open[each])
        assert not session or self.version[name] >= min(self.seen.get(session, 0), best)
        assert self.version[name] >= self.own[key], "its tokens would go back"
        self.placed[key] = (name, session)

    @rule(name=st.sampled_from(NAMES), capacity=st.integers(1, 4))
    def add(self, name: str, capacity: int) -> None:
        if name in self.capacity or any(place == name for place, _ in self.placed.values()):
            return
        self.capacity[name], self.version[name], self.is_open[name] = capacity, self.newest, True
        self.policy.add(name, capacity, self.newest)
        self.take_placed()

    @precondition(lambda self: self.capacity)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.capacity)))
        self.policy.remove(name)
        del self.capacity[name], self.version[name], self.is_open[name]
        self.take_placed()

    @precondition(lambda self: self.capacity)
    @rule(data=st.data(), is_open=st.booleans())
    def open_or_close(self, data: st.DataObject, is_open: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.capacity)))
        self.is_open[name] = is_open
        self.policy.set_open(name, is_open)
        self.take_placed()

    @precondition(lambda self: self.capacity)
    @rule(data=st.data())
    def update_one(self, data: st.DataObject) -> None:
        """A rolling update: one server at a time gets the newest version, or a new one."""
        name = data.draw(st.sampled_from(sorted(self.capacity)))
        self.newest += self.version[name] == self.newest
        self.version[name] = self.newest
        self.policy.set_version(name, self.newest)
        self.take_placed()

    @rule(session=st.sampled_from(SESSIONS), first=st.booleans(), data=st.data())
    def enter(self, session: str, first: bool, data: st.DataObject) -> None:
        self.count += 1
        self.own[self.count] = data.draw(st.integers(0, self.newest)) if first else 0
        name = self.policy.enter(self.count, session, first=first, seen_version=self.own[self.count])
        if name is None:
            self.waiting[self.count] = session
        else:
            self.place(self.count, session, name)
        self.take_placed()

    @precondition(lambda self: self.placed)
    @rule(data=st.data(), sees=st.booleans())
    def leave(self, data: st.DataObject, sees: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.placed)))
        name, session = self.placed.pop(key)
        version = self.version.get(name) if sees else None
        self.policy.leave(key, version)
        if version is not None and session:
            self.seen[session] = max(self.seen.get(session, 0), version)
        self.take_placed()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[key]
        self.policy.leave(key)
        self.take_placed()

    @invariant()
    def is_bounded(self) -> None:
        loads = Counter(name for name, _ in self.placed.values())
        for name, capacity in self.capacity.items():
            assert self.policy.num_open(name) == loads[name] <= capacity
        assert self.policy.num_sessions <= 4
        assert self.policy.num_waiting == len(self.waiting)

    @invariant()
    def none_waits_needlessly(self) -> None:
        loads = Counter(name for name, _ in self.placed.values())
        free = [each for each, is_open in self.is_open.items() if is_open and loads[each] < self.capacity[each]]
        if free and self.waiting:
            best = max(self.version[each] for each in free)
            for key, session in self.waiting.items():
                assert session or self.own[key] > best, "a request without a session accepts every newer version"
                assert max(self.own[key], *self.seen.values(), 0) > best

    @invariant()
    def what_waits_for_newer_weights_is_known(self) -> None:
        newest = max((self.version[each] for each, is_open in self.is_open.items() if is_open), default=0)
        for key in self.waiting:
            missing = self.policy.missing_version(key)
            assert missing is None or missing > newest
            assert missing is not None or self.own[key] <= newest
        assert all(self.policy.missing_version(key) is None for key in self.placed)


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


@given(st.data(), st.integers(2, 4), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_rolling_updates_never_take_an_episode_back(data, num_servers, capacity):
    """One server after another closes, takes the next version and opens; some are lost and come back with it."""
    many, names = policy(num_servers, capacity=capacity), [f"s{number}" for number in range(num_servers)]
    version, queue = dict.fromkeys(names, 0), []
    seen: dict[str, int] = {}
    running: dict[int, tuple[str, str]] = {}
    waiting: dict[int, str] = {}
    lost: set[str] = set()

    def begin(key: int, episode: str, name: str) -> None:
        assert version[name] >= seen.get(episode, 0), "the episode would go back to older weights"
        running[key] = (name, episode)

    def hand_out() -> None:
        for key, name in many.take_placed():
            begin(key, waiting.pop(key), name)

    for key in range(60):
        action = data.draw(st.sampled_from(["turn", "turn", "end", "roll", "lose"]))
        if action == "turn":
            episode = f"episode {data.draw(st.integers(0, 5))}"
            name = many.enter(key, episode)
            waiting |= {key: episode} if name is None else {}
            if name is not None:
                begin(key, episode, name)
        elif action == "end" and running:
            ended = data.draw(st.sampled_from(sorted(running)))
            name, episode = running.pop(ended)
            many.leave(ended, version[name])
            seen[episode] = max(seen.get(episode, 0), version[name])
        elif action == "roll":
            queue = queue or sorted(names, key=many.num_open)
            name = queue.pop(0)
            many.set_open(name, False)
            hand_out()
            version[name] = max(version.values()) + (len(queue) == num_servers - 1)
            many.set_version(name, version[name])
            many.set_open(name, True)
            lost.discard(name)
        elif action == "lose" and len(lost) < num_servers - 1:
            lost.add(name := data.draw(st.sampled_from(sorted(set(names) - lost))))
            many.set_open(name, False)
        hand_out()
        assert many.num_waiting == len(waiting)
    for number, name in enumerate(names):  # when all servers have the newest weights, none waits for weights
        version[name] = max(version.values()) + (number == 0)
        many.set_version(name, version[name])
        many.set_open(name, True)
        hand_out()
    assert all(many.missing_version(key) is None for key in waiting)


def policy(num_servers: int, capacity: int = 100, **options) -> Policy:
    made = Policy(**options)
    for number in range(num_servers):
        made.add(f"s{number}", capacity)
    return made


def test_the_least_loaded_server_comes_first_and_equal_ones_take_turns():
    many = policy(3)
    assert [many.enter(key) for key in range(6)] == ["s0", "s1", "s2"] * 2
    many.leave(1)
    assert many.enter(6) == "s1"


def test_a_session_stays_with_its_server_until_that_one_is_overloaded_full_or_closed():
    many = policy(2, capacity=8, overload_lead=3)
    home = many.enter(0, "s")
    many.leave(0)
    for key in range(1, 5):
        assert many.enter(key, "s") == home
    assert many.enter(5, "s") != home, "4 requests there and none elsewhere is a lead of more than 3"
    many.set_open(home, False)
    moved = many.enter(6, "t")
    assert moved != home
    counts = many.counts
    assert (counts.num_sticky, counts.num_moved) == (4, 1)


def test_a_session_waits_for_a_server_that_has_what_it_saw():
    many = policy(2)
    many.set_version("s1", 1)
    many.set_open("s0", False)
    assert many.enter(0, "s") == "s1"
    many.leave(0, seen_version=1)
    many.set_open("s0", True)
    many.set_open("s1", False)
    assert many.enter(1, "s") is None, "s0 has version 0"
    assert many.enter(2, "other") == "s0"
    many.set_version("s0", 1)
    assert many.take_placed() == [(1, "s0")]


def test_tokens_tell_the_version_of_a_server_and_of_a_session_that_was_forgotten():
    many = policy(2, max_sessions=1)
    assert many.enter(0, "s") == "s0"
    assert many.enter(1, "t") == "s1", "s is forgotten now"
    many.leave(0, seen_version=3)
    many.leave(1)
    assert many.enter(2, "s") == "s0", "s1 is less used, but it may be older"
    many.forget_versions()
    assert many.enter(3, "new") == "s1"


def test_requests_wait_in_order_and_a_request_that_lost_its_server_comes_first():
    one = policy(1, capacity=1)
    assert one.enter(0) == "s0"
    assert [one.enter(key) for key in (1, 2)] == [None, None]
    assert one.enter(3, first=True) is None
    order = []
    for _ in range(3):
        one.leave(order[-1] if order else 0)
        [(key, _)] = one.take_placed()
        order.append(key)
    assert order == [3, 1, 2]


def test_a_name_is_unique():
    many = policy(1)
    with pytest.raises(ValueError, match="exists already"):
        many.add("s0", 1)


def test_ten_thousand_sessions_over_eight_servers():
    many = policy(8, capacity=2048, max_sessions=20_000)
    homes = {key: many.enter(key, f"session {key}") for key in range(10_000)}
    loads = Counter(homes.values())
    assert max(loads.values()) - min(loads.values()) <= 1
    for key in range(10_000):
        many.leave(key, seen_version=0)
    again = {key: many.enter(10_000 + key, f"session {key}") for key in range(10_000)}
    assert sum(again[key] == homes[key] for key in homes) > 9_900
