"""One stream of buckets for several receivers, which read it in lockstep.

    fan_out = FanOut(update, ["a", "b"], start_limit_s=600, bucket_limit_s=60)
    futures = [engine.update_weights(fan_out.update_for(name)) for name, engine in engines.items()]
    dropped = fan_out.run()     # reads the stream on this thread; why each dropped receiver was dropped

The next bucket is read when every receiver has asked for it, because the tensors of a bucket are valid only until then.
So the learner exports its weights once, and no second bucket is held. A receiver that has ended no longer counts. One
that is lost or too slow is dropped: its stream fails, and the others continue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from headwater.core.errors import HeadwaterError, WeightsError
from headwater.core.protocols import Bucket, WeightUpdate
from headwater.core.waits import wait_until

_MARGIN_S = 60.0
"""A receiver waits longer than the reader, whose message says more."""


class FanOut:
    """``leave`` and the streams may be used from any thread, ``run`` from one."""

    def __init__(
        self,
        update: WeightUpdate,
        names: Sequence[str],
        *,
        start_limit_s: float,
        bucket_limit_s: float,
        why_lost: Callable[[str], str] = lambda name: "",
    ) -> None:
        """``start_limit_s`` is for the first bucket, before which running responses may have to end.

        ``why_lost`` says why a receiver can no longer be reached; empty if it can. It is not waited for then.
        """
        self._update = update
        self._why_lost = why_lost
        self._start_limit_s, self._bucket_limit_s = start_limit_s, bucket_limit_s
        self._changed = threading.Condition()
        self._asked = dict.fromkeys(names, 0)
        """Per receiver that still reads, the number of buckets that it has asked for."""
        self._dropped: dict[str, str] = {}
        self._num_read = 0
        self._bucket: Bucket | None = None
        """None after the last one."""
        self._failure: BaseException | None = None

    def update_for(self, name: str) -> WeightUpdate:
        """The update as one receiver takes it."""
        return replace(self._update, buckets=_Branch(self, name))

    def leave(self, name: str) -> None:
        """A receiver reads no more: it has taken everything, or has failed."""
        with self._changed:
            self._asked.pop(name, None)
            self._changed.notify_all()

    def run(self) -> dict[str, str]:
        """Read the stream and pass it on, until it has ended or no receiver is left."""
        try:
            buckets = iter(self._update.buckets)
            while self._all_have_asked():
                bucket = next(buckets, None)
                with self._changed:
                    self._bucket = bucket
                    self._num_read += 1
                    self._changed.notify_all()
                if bucket is None:
                    break
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise
        finally:
            self._update.close()
        return self._dropped

    def _all_have_asked(self) -> bool:
        """Wait until every receiver wants the next bucket, and drop those that are too late. False if none is left."""
        limit_s = self._bucket_limit_s if self._num_read else self._start_limit_s
        deadline = time.monotonic() + limit_s

        def late() -> list[str]:
            return [name for name, number in self._asked.items() if number <= self._num_read]

        def is_settled() -> bool:
            is_over = time.monotonic() >= deadline
            for name in late():
                if lost := self._why_lost(name):
                    self._drop(name, f"was lost: {lost}")
                elif is_over:
                    self._drop(name, f"did not take bucket {self._num_read} within {limit_s:.0f} s")
            return not late()

        def describe() -> str:
            return f"{', '.join(list(self._asked))} read bucket {self._num_read} of version {self._update.version}"

        with self._changed:
            wait_until(self._changed, is_settled, describe, kind="weights", hard_limit_s=limit_s + _MARGIN_S)
            return bool(self._asked)

    def _drop(self, name: str, reason: str) -> None:
        del self._asked[name]
        self._dropped[name] = reason

    def next_bucket(self, name: str) -> Bucket | None:
        """The next bucket for one receiver; None after the last one."""
        with self._changed:
            self._refuse(name)
            self._asked[name] += 1
            self._changed.notify_all()

            def is_there() -> bool:
                self._refuse(name)
                return self._num_read >= self._asked[name]

            def describe() -> str:
                waited_for = [each for each, number in self._asked.items() if number < self._asked.get(name, 0)]
                others = f"{', '.join(waited_for)} is slower" if waited_for else "the learner exports it"
                return f"server {name} waits for bucket {self._num_read} of the weights; {others}"

            limit_s = self._start_limit_s + self._bucket_limit_s + 2 * _MARGIN_S
            wait_until(self._changed, is_there, describe, kind="weights", hard_limit_s=limit_s)
            return self._bucket

    def _refuse(self, name: str) -> None:
        if self._failure is not None:
            if isinstance(self._failure, HeadwaterError):
                raise self._failure
            raise WeightsError(f"the stream of weights failed: {self._failure}") from self._failure
        if name in self._dropped:
            raise WeightsError(f"server {name} was dropped from the update: it {self._dropped[name]}")
        if name not in self._asked:
            raise WeightsError(f"server {name} has left the update")


class _Branch(Iterator[Bucket]):
    """The stream of one receiver."""

    def __init__(self, fan_out: FanOut, name: str) -> None:
        self._fan_out = fan_out
        self._name = name
        self._has_ended = False

    def __next__(self) -> Bucket:
        bucket = None if self._has_ended else self._fan_out.next_bucket(self._name)
        if bucket is None:
            self._has_ended = True
            raise StopIteration
        return bucket

    def close(self) -> None:
        self._fan_out.leave(self._name)
