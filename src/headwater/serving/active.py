"""The requests that a server has under way, by the names under which a client may abort them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headwater.serving.errors import wrong


class ActiveRequests:
    """A name stands for one request of the engine or for several: a batch, or the samples of one prompt."""

    def __init__(self) -> None:
        self._ids: dict[str, list[tuple[str, ...]]] = {}

    @contextmanager
    def hold(self, names: Mapping[str, tuple[str, ...]], field: str) -> Iterator[None]:
        """Within, ``names`` are taken; ``field`` is where the client wrote them."""
        for name in names:
            if name in self._ids:
                raise wrong(field, name, "a request of this name is running; choose another name, or abort that one")
        with self.share(names):
            yield

    @contextmanager
    def share(self, names: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
        """As ``hold``, but beside others of the same name; whoever aborts it ends them all."""
        for name, ids in names.items():
            self._ids.setdefault(name, []).append(ids)
        try:
            yield
        finally:
            for name, ids in names.items():
                self._ids[name].remove(ids)
                if not self._ids[name]:
                    del self._ids[name]

    def find(self, name: str) -> tuple[str, ...]:
        """The engine's ids behind ``name``; none if it is unknown or over."""
        return tuple(dict.fromkeys(each for ids in self._ids.get(name, ()) for each in ids))
