"""Which server gets a request. Pure bookkeeping: no clock, no threads, no input or output.

    policy = Policy()
    policy.add("a", capacity=64)
    policy.add("b", capacity=64)
    place = policy.enter(1, "episode 7")         # a server, or None: the request waits
    policy.leave(1, seen_version=3)              # its place is free; the session has seen version 3
    for key, server in policy.take_placed(): ... # requests that waited and now have a place

A request goes to the server that holds its session's cache, unless that one is closed, full or overloaded; otherwise to
the server with the fewest requests. A session never goes to a server with older weights than it has seen. A request
that no server can take waits; waiting requests get places in the order in which they came.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

MAX_SESSIONS = 65_536
"""How many sessions are remembered."""
OVERLOAD_LEAD = 32
OVERLOAD_RATIO = 1.5
"""A session leaves its server if that one has at least this many requests more than the server with the fewest, and
also at least this many times as many. Computing the prefix again then costs less than the wait."""


@dataclass(slots=True)
class _Server:
    name: str
    capacity: int
    version: int
    is_open: bool = True
    num_open: int = 0
    stamp: int = 0
    """The newest of its entries in the heap of loads."""

    @property
    def has_room(self) -> bool:
        return self.is_open and self.num_open < self.capacity


@dataclass(slots=True)
class _Session:
    home: str
    floor: int
    """The newest version that it has seen."""


@dataclass(slots=True)
class _Waiting:
    key: int
    session: str
    ticket: int
    floor: int
    seen: int
    """The newest version of the tokens that the request has already."""


@dataclass(frozen=True, slots=True)
class PolicyCounts:
    """What the policy has decided so far."""

    num_placed: int = 0
    num_sticky: int = 0
    """Requests that went to the server of their session."""
    num_moved: int = 0
    """Requests that went to another server than their session's last one."""


class Policy:
    """Not safe for several threads: its caller holds a lock."""

    def __init__(
        self,
        *,
        max_sessions: int = MAX_SESSIONS,
        overload_lead: int = OVERLOAD_LEAD,
        overload_ratio: float = OVERLOAD_RATIO,
    ) -> None:
        self._max_sessions = max_sessions
        self._lead, self._ratio = overload_lead, overload_ratio
        self._servers: dict[str, _Server] = {}
        self._by_load: list[tuple[int, int, str]] = []
        """A heap of load, stamp and server. Only the entry with a server's newest stamp counts."""
        self._stamps = itertools.count(1)
        self._newest = 0
        """The newest version of a server that is open."""
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._forgotten_floor = 0
        """The newest version that a session had seen which is no longer remembered."""
        self._places: dict[int, tuple[str, str]] = {}
        """The server and the session of each request that has a place."""
        self._queues: dict[int, OrderedDict[int, _Waiting]] = {}
        """Waiting requests in order, by the oldest version that they accept."""
        self._queue_of: dict[int, int] = {}
        self._tickets = itertools.count()
        self._early_tickets = itertools.count(-1, -1)
        self._placed: list[tuple[int, str]] = []
        self._num_placed = self._num_sticky = self._num_moved = 0

    # Servers

    def add(self, name: str, capacity: int, version: int = 0, *, is_open: bool = True) -> None:
        if name in self._servers:
            raise ValueError(f"server {name!r} exists already; use another name")
        self._servers[name] = _Server(name, capacity, version, is_open)
        self._rank(self._servers[name])
        self._changed()

    def remove(self, name: str) -> None:
        """Its requests keep their places until they leave."""
        del self._servers[name]
        self._changed()

    def set_open(self, name: str, is_open: bool) -> None:
        """Whether a server gets requests. Those that it has are not affected."""
        server = self._servers[name]
        if server.is_open != is_open:
            server.is_open = is_open
            self._rank(server)
            self._changed()

    def set_version(self, name: str, version: int) -> None:
        server = self._servers[name]
        if server.version != version:
            server.version = version
            self._changed()

    def forget_versions(self) -> None:
        """Older versions are allowed again, because another run has begun."""
        self._forgotten_floor = 0
        for session in self._sessions.values():
            session.floor = 0
        for queue in self._queues.values():
            for waiting in queue.values():
                waiting.seen = 0
        self._serve_queue()

    def num_open(self, name: str) -> int:
        return self._servers[name].num_open

    @property
    def num_waiting(self) -> int:
        return len(self._queue_of)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def counts(self) -> PolicyCounts:
        return PolicyCounts(self._num_placed, self._num_sticky, self._num_moved)

    # Requests

    def enter(self, key: int, session: str = "", *, first: bool = False, seen_version: int = 0) -> str | None:
        """The server for a request, or None if it waits. ``first`` puts it before all others that wait.

        ``seen_version`` is the newest of the tokens that it has already, which another server generated.
        """
        floor = max(self._floor(session), seen_version)
        if (server := self._choose(session, floor)) is not None:
            return self._place(key, session, server)
        ticket = next(self._early_tickets if first else self._tickets)
        self._wait(_Waiting(key, session, ticket, floor, seen_version), first=first)
        return None

    def missing_version(self, key: int) -> int | None:
        """The version that a request waits for, because all open servers have older weights. Otherwise None."""
        if key not in self._queue_of:
            return None
        waiting = self._queues[self._queue_of[key]][key]
        floor = max(self._floor(waiting.session), waiting.seen)
        return floor if floor > self._newest else None

    def leave(self, key: int, seen_version: int | None = None) -> None:
        """A request has ended, or its caller no longer waits. ``seen_version`` is the newest of its tokens."""
        if key in self._queue_of:
            self._unqueue(key)
            return
        name, session = self._places.pop(key)
        if seen_version is not None:
            self._note(session, seen_version)
        server = self._servers.get(name)
        if server is not None:
            if seen_version is not None and seen_version > server.version:
                server.version = seen_version  # its tokens tell it earlier than its status
                self._newest = max(self._newest, seen_version)
            server.num_open -= 1
            self._rank(server)
            self._serve_queue()

    def take_placed(self) -> list[tuple[int, str]]:
        """The requests that waited and have got a place since the last call."""
        placed, self._placed = self._placed, []
        return placed

    def _changed(self) -> None:
        self._newest = max((each.version for each in self._servers.values() if each.is_open), default=0)
        self._serve_queue()

    # Sessions

    def _floor(self, session: str) -> int:
        if not session:
            return 0
        known = self._sessions.get(session)
        if known is not None:
            return known.floor
        if not self._forgotten_floor:
            return 0
        # A session that is not remembered may have seen this version. If no server has it any more, availability comes
        # first: otherwise every new session would wait.
        return min(self._forgotten_floor, self._newest)

    def _note(self, session: str, version: int) -> None:
        known = self._sessions.get(session)
        if known is not None:
            known.floor = max(known.floor, version)
        elif session:
            self._forgotten_floor = max(self._forgotten_floor, version)

    def _remember(self, session: str, home: str) -> None:
        known = self._sessions.get(session)
        if known is None:
            self._sessions[session] = _Session(home, self._floor(session))
            if len(self._sessions) > self._max_sessions:
                _, forgotten = self._sessions.popitem(last=False)
                self._forgotten_floor = max(self._forgotten_floor, forgotten.floor)
            return
        self._num_sticky += known.home == home
        self._num_moved += known.home != home
        known.home = home
        self._sessions.move_to_end(session)

    # Choosing

    def _choose(self, session: str, floor: int) -> _Server | None:
        least = self._least_loaded(floor)
        known = self._sessions.get(session) if session else None
        home = self._servers.get(known.home) if known is not None else None
        if least is None or home is None or not home.has_room or home.version < floor:
            return least
        is_overloaded = home.num_open > least.num_open + self._lead and home.num_open > least.num_open * self._ratio
        return least if is_overloaded else home

    def _least_loaded(self, floor: int) -> _Server | None:
        """Of the servers with room and weights that are not older than ``floor``."""
        passed: list[tuple[int, int, str]] = []
        found = None
        while self._by_load:
            entry = self._by_load[0]
            server = self._servers.get(entry[2])
            if server is None or entry[1] != server.stamp or not server.has_room:
                heapq.heappop(self._by_load)  # a server that gets room is ranked again
            elif server.version < floor:
                passed.append(heapq.heappop(self._by_load))
            else:
                found = server
                break
        for entry in passed:
            heapq.heappush(self._by_load, entry)
        return found

    def _rank(self, server: _Server) -> None:
        """Enter the present load of a server. Of equally loaded servers, the one that waited longest comes first."""
        if not server.has_room:
            return
        server.stamp = next(self._stamps)
        heapq.heappush(self._by_load, (server.num_open, server.stamp, server.name))
        if len(self._by_load) > 4 * len(self._servers) + 64:
            current = (each for each in self._servers.values() if each.has_room)
            self._by_load = [(each.num_open, each.stamp, each.name) for each in current]
            heapq.heapify(self._by_load)

    def _place(self, key: int, session: str, server: _Server) -> str:
        if key in self._places:
            raise ValueError(f"request {key} has a place already")
        self._places[key] = (server.name, session)
        self._num_placed += 1
        server.num_open += 1
        self._rank(server)
        if session:
            self._remember(session, server.name)
        return server.name

    # The queue

    def _wait(self, waiting: _Waiting, *, first: bool = False) -> None:
        queue = self._queues.setdefault(waiting.floor, OrderedDict())
        queue[waiting.key] = waiting
        if first:
            queue.move_to_end(waiting.key, last=False)
        self._queue_of[waiting.key] = waiting.floor

    def _unqueue(self, key: int) -> _Waiting:
        floor = self._queue_of.pop(key)
        queue = self._queues[floor]
        waiting = queue.pop(key)
        if not queue:
            del self._queues[floor]
        return waiting

    def _serve_queue(self) -> None:
        """Give places to waiting requests, the oldest first, until no server has room for any of them."""
        closed: set[int] = set()
        while (waiting := self._next_waiting(closed)) is not None:
            floor = max(self._floor(waiting.session), waiting.seen)
            if floor > waiting.floor:  # its session has seen newer weights while it waited
                self._requeue(waiting, floor)
                continue
            server = self._choose(waiting.session, floor)
            if server is None:
                closed.add(waiting.floor)
                continue
            self._unqueue(waiting.key)
            self._placed.append((waiting.key, self._place(waiting.key, waiting.session, server)))

    def _next_waiting(self, closed: set[int]) -> _Waiting | None:
        return min(self._heads(closed), key=lambda each: each.ticket, default=None)

    def _heads(self, closed: set[int]) -> Iterator[_Waiting]:
        for floor, queue in self._queues.items():
            if floor not in closed:
                yield next(iter(queue.values()))

    def _requeue(self, waiting: _Waiting, floor: int) -> None:
        """Move a request to the queue of another version, where its ticket keeps its turn."""
        self._unqueue(waiting.key)
        waiting.floor = floor
        later = self._queues.get(floor)
        self._wait(waiting)
        if later is not None and next(iter(later.values())).ticket > waiting.ticket:
            later.move_to_end(waiting.key, last=False)
