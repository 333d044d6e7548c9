"""Inference servers that compute nothing: they only know how long a request would take.

Requests and responses are short: one token stands for many, and its id is their number. A prompt is one such token, and
a response has one per policy version.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.backends.router.options import RouterOptions
from headwater.backends.router.policy import Policy
from headwater.core.capabilities import Capabilities
from headwater.core.requests import ModelRequest, ModelResponse
from headwater.planner.costs import GenerationCosts


@dataclass(eq=False)
class _Sequence:
    """A request on a server."""

    request: ModelRequest
    num_tokens: int
    """Tokens that it will generate."""
    done: asyncio.Future[None]
    arrived: float
    began: float = 0.0
    first_step: float = 0.0
    """The server's step number when the sequence began; it may lie between two steps."""
    runs: list[tuple[int, float]] = field(default_factory=list)
    """The policy versions that it has seen: version, and the server's step number from which on it was used."""

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return self.request.input_tokens[0]

    @property
    def num_reserved(self) -> int:
        """Places in the KV cache when it is complete."""
        return self.num_prompt + self.num_tokens


class SimulatedServer:
    """One server with continuous batching: every decode step gives each running sequence one token.

    ``GenerationCosts.decode_s`` is the time of a step. Prompts are computed between steps and delay them. Only the
    beginning and the end of a sequence are events. The number of steps between two events follows from the formula, so
    a simulation costs the same for short and long responses.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, costs: GenerationCosts, *, version: int = 0) -> None:
        self._loop = loop
        self._costs = costs
        self._version = version
        self._running: list[tuple[float, int, _Sequence]] = []
        """A heap: the step number at which the sequence ends, a number to break ties, the sequence."""
        self._waiting: deque[_Sequence] = deque()
        self._prefixes: Counter[str] = Counter()
        """Prompts whose keys and values are in the cache, by the number of running sequences that use them."""
        self._num_reserved = 0
        self._context = 0.0
        """Tokens in the cache."""
        self._step = 0.0
        """Decode steps since the beginning."""
        self._now = 0.0
        """The time to which ``_step`` belongs. It is in the future while prompts are computed."""
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = itertools.count()
        self.busy_s = 0.0
        """Time in which at least one sequence ran."""
        self.num_tokens = 0
        """Tokens of finished sequences."""

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    async def generate(self, request: ModelRequest) -> ModelResponse:
        loop = self._loop
        sequence = _Sequence(request, request.sampling.max_new_tokens, loop.create_future(), loop.time())
        self._waiting.append(sequence)
        self._advance()
        self._admit()
        await sequence.done
        runs = self._counted(sequence)
        counts = tuple(count for _, count in runs)
        now = loop.time()
        return ModelResponse(
            request.input_tokens,
            counts,
            (0.0,) * len(runs),
            tuple(version for version, _ in runs),
            "stop",
            queue_s=sequence.began - sequence.arrived,
            generate_s=now - sequence.began,
        )

    def update(self, version: int, *, pause_s: float, recomputes: bool) -> None:
        """Use new weights from now on. ``recomputes``: keys and values of running sequences are computed again."""
        self._advance()
        self._version = version
        for _, _, sequence in self._running:
            sequence.runs.append((version, self._step))
        again = self._context * self._costs.prefill_per_token_s if recomputes else 0.0
        self._delay(pause_s + again, is_busy=bool(self._running))
        self._plan()

    def _counted(self, sequence: _Sequence) -> list[tuple[int, int]]:
        """The versions of a finished sequence with their numbers of tokens, which sum to ``num_tokens``."""
        starts = [min(sequence.num_tokens, math.ceil(step - sequence.first_step - 1e-6)) for _, step in sequence.runs]
        ends = [*starts[1:], sequence.num_tokens]
        return [
            (version, end - start)
            for (version, _), start, end in zip(sequence.runs, starts, ends, strict=True)
            if end > start
        ]

    # The fluid model of decoding

    def _rates(self) -> tuple[float, float]:
        """``a`` and ``b`` such that ``k`` more steps take ``a * k + b * k**2 / 2`` seconds."""
        costs, count = self._costs, len(self._running)
        return costs.decode_s(count, self._context), costs.step_per_context_token_s * count

    def _advance(self) -> None:
        """Count the steps since the last event."""
        now = self._loop.time()
        elapsed = now - self._now
        if elapsed <= 0:
            return
        if self._running:
            first, growth = self._rates()
            # The solution of ``first * k + growth * k**2 / 2 = elapsed`` in a form that is exact for a small growth.
            steps = 2 * elapsed / (first + math.sqrt(first * first + 2 * growth * elapsed))
            steps = min(steps, self._running[0][0] - self._step)
            self._step += steps
            self._context += steps * len(self._running)
            self.busy_s += elapsed
        self._now = now

    def _delay(self, seconds: float, *, is_busy: bool = True) -> None:
        self._now = max(self._now, self._loop.time()) + seconds
        self.busy_s += seconds if is_busy else 0.0

    def _admit(self) -> None:
        """Begin waiting sequences while the cache has room, first come, first served."""
        costs = self._costs
        while self._waiting and len(self._running) < costs.max_sequences:
            sequence = self._waiting[0]
            if self._running and self._num_reserved + sequence.num_reserved > costs.kv_cache_tokens:
                break
            self._waiting.popleft()
            self._begin(sequence)
        self._plan()

    def _begin(self, sequence: _Sequence) -> None:
        num_prompt = sequence.num_prompt
        prefix = sequence.request.request_id.partition("#")[0]
        if not self._prefixes[prefix]:
            self._delay(num_prompt * self._costs.prefill_per_token_s)
        self._prefixes[prefix] += 1
        self._num_reserved += sequence.num_reserved
        self._context += num_prompt
        sequence.began = self._loop.time()
        sequence.first_step = self._step
        sequence.runs.append((self._version, self._step))
        heapq.heappush(self._running, (self._step + sequence.num_tokens, next(self._numbers), sequence))

    def _plan(self) -> None:
        """Set the timer to the end of the next sequence."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._running:
            return
        first, growth = self._rates()
        steps = self._running[0][0] - self._step
        due = max(self._now, self._loop.time()) + first * steps + growth * steps * steps / 2
        self._timer = self._loop.call_at(due, self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        while self._running and self._running[0][0] <= self._step + 1e-6:
            _, _, sequence = heapq.heappop(self._running)
            self._end(sequence)
        self._admit()

    def _end(self, sequence: _Sequence) -> None:
        prefix = sequence.request.request_id.partition("#")[0]
        self._prefixes[prefix] -= 1
        if not self._prefixes[prefix]:
            del self._prefixes[prefix]
        self._num_reserved -= sequence.num_reserved
        self._context -= sequence.num_reserved
        self.num_tokens += sequence.num_tokens
        if not sequence.done.done():  # an episode that was cancelled no longer waits
            sequence.done.set_result(None)


class SimulatedFleet:
    """Several servers, and the router's own policy to choose one for each request."""

    capabilities = Capabilities()

    def __init__(self, servers: Sequence[SimulatedServer], options: RouterOptions | None = None) -> None:
        self.servers = tuple(servers)
        self._policy = Policy()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[str]] = {}
        options = options or RouterOptions()
        for index in range(len(servers)):
            self._policy.add(str(index), options.max_open_per_server)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        key = next(self._numbers)
        name = self._policy.enter(key, request.session)
        if name is None:
            place: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._waiting[key] = place
            name = await place
        seen: int | None = None
        try:
            response = await self.servers[int(name)].generate(request)
            seen = response.output_versions[-1]
            return response
        finally:
            self._policy.leave(key, seen)
            for placed, server in self._policy.take_placed():
                self._waiting.pop(placed).set_result(server)

    def update(self, version: int, *, pause_s: float, recomputes: bool) -> None:
        """All servers take new weights; see ``SimulatedServer.update``."""
        for index, server in enumerate(self.servers):
            server.update(version, pause_s=pause_s, recomputes=recomputes)
            self._policy.set_version(str(index), version)

    @property
    def num_open(self) -> int:
        return self._policy.num_waiting + sum(server.load for server in self.servers)

    def pause(self) -> None:
        """Called around requests that start together. On a virtual clock they do so anyway."""

    def resume(self) -> None: ...
