"""The requests that are under way, and who is asked for what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from headwater.backends.served.open_request import OpenRequest
from headwater.backends.served.server_client import ENGINE_FAILED, RequestLink, error_of
from headwater.core.errors import HeadwaterError, RolloutFailed
from headwater.observe.spans import Spans
from headwater.serving.native.request import write_request

_MAX_STUCK = 4


class OpenRequests:
    """Belongs to the engine's thread. ``link`` is the connection to the child that serves now, if one does."""

    def __init__(self, spans: Spans, *, on_finish: Callable[[], None], on_failed_engine: Callable[[str], None]) -> None:
        """``on_failed_engine`` is told why."""
        self.link: RequestLink | None = None
        self._open: dict[int, OpenRequest] = {}
        self._spans = spans
        self._generating = ExitStack()
        self._on_finish = on_finish
        self._on_failed_engine = on_failed_engine

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, opened: OpenRequest) -> None:
        if not self._open:
            self._generating.enter_context(self._spans.span("generate"))
        self._open[opened.number] = opened
        self._ask_for(opened)

    def leave(self, opened: OpenRequest) -> None:
        """Nobody waits for it any more."""
        if opened.number in self._open:
            self._drop(opened)
            if self.link is not None:
                self.link.post({"id": opened.number, "leave": True})

    def go_on(self, link: RequestLink) -> None:
        """A new child serves: it is asked for what is left of every request."""
        self.link = link
        for opened in list(self._open.values()):
            if opened.was_sent:  # one that came while none served has seen no death
                opened.num_stuck += 1
            if opened.num_stuck > _MAX_STUCK:
                # Others finish meanwhile, so the engine would be started again and again for this one.
                self._drop(opened)
                opened.fail(
                    RolloutFailed(
                        f"request {opened.request.request_id}: {opened.num_stuck} processes of the engine died before "
                        "its next token came; it may be what they die of"
                    )
                )
            else:
                self._ask_for(opened)

    def take(self, line: Mapping[str, Any]) -> None:
        """New tokens of a request, or its end."""
        opened = self._open.get(line["id"])
        if opened is None:
            return  # its caller has left
        if "error" in line:
            if line["error"]["code"] == ENGINE_FAILED:
                # The process lives and will never make a token again; another one will, for this request too.
                self._on_failed_engine(line["error"]["message"])
            else:
                self._drop(opened)
                opened.fail(error_of(line))
            return
        opened.extend(line["tokens"], line["logprobs"], line["versions"])
        reason = line.get("stop_reason")
        if reason == "abort":
            # Nobody here asked for it: the process was told to stop. Whoever serves next goes on.
            self._ask_for(opened)
        elif reason is not None:
            self._drop(opened)
            opened.finish(reason)
            self._on_finish()

    def fail_all(self, error: HeadwaterError) -> None:
        for opened in list(self._open.values()):
            self._drop(opened)
            opened.fail(error)

    def abort(self, request_id: str | None) -> int:
        """Answer the requests with this id, or all, with the tokens they have. Return how many there were."""
        wanted = [each for each in self._open.values() if request_id in (None, each.request.request_id)]
        for opened in wanted:
            self.leave(opened)
            opened.finish("abort")
        return len(wanted)

    def abort_all(self) -> None:
        """Answer every request with what it has."""
        for opened in list(self._open.values()):
            self._drop(opened)
            opened.finish("abort")

    def _ask_for(self, opened: OpenRequest) -> None:
        if self.link is not None:
            opened.was_sent = True
            self.link.post({"id": opened.number, "request": write_request(opened.rest())})

    def _drop(self, opened: OpenRequest) -> None:
        del self._open[opened.number]
        if not self._open:
            self._generating.close()
