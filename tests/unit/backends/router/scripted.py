"""An engine that generates what its script says, a token at a time, and dies when it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from headwater.core.capabilities import ALL_TAGS, Capabilities, EngineStatus
from headwater.core.errors import RolloutFailed, ServerLost, TransferLost
from headwater.core.protocols import EngineLimits, WeightUpdate, whole_response
from headwater.core.requests import ModelRequest, ModelResponse

TICK_S = 0.001
LIMIT_S = 120.0


def expected(request: ModelRequest) -> tuple[int, ...]:
    """Every engine generates the same for a request: the token at a place depends on the key and the place."""
    return tuple((request.rng_key * 31 + place) % 997 for place in range(request.sampling.max_new_tokens))


class ScriptedEngine:
    """Deaths, hangs and slow weight updates on demand. Belongs to no thread."""

    def __init__(
        self, *, resumable: bool = True, max_queue: int = 64, version: int = 0, tick_s: float = TICK_S
    ) -> None:
        self.capabilities = Capabilities(resumable=resumable, streaming=False, dtype="float32")
        self.limits = EngineLimits(vocab_size=1000, max_model_tokens=4096, max_request_tokens=4096, max_queue=max_queue)
        self.version = version
        self.instance = ""
        self.weights = "initial"
        self.is_dead = self.is_hanging = self.needs_weights = self.is_paused = self.is_closed = False
        self.asleep: set[str] = set()
        self.most_open = self.num_open = self.num_served = 0
        self.sessions: list[str] = []
        self.fails_update: Exception | None = None
        self.may_update = threading.Event()
        """An update waits for it after its first bucket."""
        self.may_update.set()
        self.may_begin = threading.Event()
        """An update waits for it before its first bucket."""
        self.may_begin.set()
        self.is_updating = False
        self.has_failed = False
        self.pause_s = 0.0
        self.measures = True
        self.holds_at: int | None = None
        """Number of tokens at which requests wait until this is None again."""
        self.num_held = 0
        """Requests that have waited so, or do now."""
        self._aborted: set[int] = set()
        self._tick_s = tick_s
        self._open: dict[int, ModelRequest] = {}
        self._count = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        if not self.capabilities.resumable:
            assert not request.given_tokens
        self._count += 1
        number, self._open[self._count] = self._count, request
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.sessions.append(request.session)
        try:
            return await self._generate(number, request)
        finally:
            self.num_open -= 1
            del self._open[number]

    async def _generate(self, number: int, request: ModelRequest) -> ModelResponse:
        num_given = len(request.given_tokens)
        whole = expected(request)
        if not self.capabilities.resumable:
            # The tokens so far are the end of the prompt, whose first token says how long the response is in all.
            num_before = len(request.input_tokens) - 1
            whole = tuple((request.rng_key * 31 + num_before + place) % 997 for place in range(len(whole)))
        tokens: list[int] = []
        versions: list[int] = []

        def response(reason: str) -> ModelResponse:
            zeros = (0.0,) * len(tokens)
            return ModelResponse(request.input_tokens, tuple(tokens), zeros, tuple(versions), reason)

        for token in whole[num_given:]:
            self.num_held += self.holds_at == len(tokens)
            while self.is_hanging or self.is_paused or self.holds_at == len(tokens):
                await asyncio.sleep(TICK_S)
                if number in self._aborted:
                    return response("abort")
            await asyncio.sleep(self._tick_s)
            if self.has_failed:
                raise RolloutFailed("the engine has failed")
            if self.is_dead:
                raise ServerLost("connection refused", response("abort"))
            if number in self._aborted:
                return response("abort")
            tokens.append(token)
            versions.append(self.version)
        self.num_served += 1
        return response("length")

    def astream(self, request: ModelRequest):
        return whole_response(self, request)

    def check(self, request: ModelRequest) -> None: ...

    def status(self) -> EngineStatus:
        if self.is_dead:
            raise ServerLost("connection refused")
        return EngineStatus(
            self.version,
            num_running=self.num_open,
            needs_weights=self.needs_weights,
            is_paused=self.is_paused,
            is_asleep=bool(self.asleep),
            is_alive=not self.is_closed and not self.has_failed,
            is_reachable=not self.is_hanging,
            metrics=self._measured() if self.measures else {},
        )

    def _measured(self) -> dict[str, float]:
        return {"num_running": 99, "num_finished": self.num_served, "last_update_pause_s": self.pause_s}

    def abort(self, request_id: str | None = None) -> int:
        found = [number for number, each in self._open.items() if request_id in (None, each.request_id)]
        self._aborted.update(found)
        return len(found)

    def pause(self) -> None:
        self._check()
        self.is_paused = True

    def resume(self) -> None:
        self._check()
        self.is_paused = False

    def sleep(self, tags: Sequence[str] = ALL_TAGS) -> None:
        self._check()
        self.asleep |= set(tags)

    def wake(self, tags: Sequence[str] = ALL_TAGS) -> None:
        self._check()
        self.asleep -= set(tags)

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self._check()
        self.version = version

    def weights_checksum(self) -> str:
        self._check()
        return self.weights

    def update_weights(self, update: WeightUpdate, mode=None) -> Future[None]:
        done: Future[None] = Future()

        def take() -> None:
            taken = []
            try:
                self.may_begin.wait(LIMIT_S)
                for bucket in update.buckets:
                    self.is_updating = True
                    self.may_update.wait(LIMIT_S)
                    if self.is_dead:
                        raise TransferLost("connection reset")
                    if self.fails_update is not None:
                        raise self.fails_update
                    taken.append(f"{bucket[0][0]}={float(bucket[0][1].sum()):g}")
                self.version, self.weights, self.needs_weights = update.version, ",".join(taken), False
            except Exception as error:  # noqa: BLE001
                done.set_exception(error)
            else:
                done.set_result(None)
            finally:
                self.is_updating = False
                update.close()

        threading.Thread(target=take, daemon=True).start()
        return done

    def close(self) -> None:
        self.is_closed = True
        self.abort()

    def _check(self) -> None:
        if self.is_dead:
            raise ServerLost("connection refused")
