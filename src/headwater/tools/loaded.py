"""``LoadedTool``: one tool of a run, which all episodes share, with its limits."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.core.errors import DataError
from headwater.tools.base import BaseTool, ToolUnavailable
from headwater.tools.result_text import ResultText, Side
from headwater.tools.running import CallTimedOut, Slots, call_method, has_succeeded
from headwater.tools.schema import ToolSchema

logger = logging.getLogger(__name__)

METHODS = ("create", "execute", "calc_reward", "release")


@dataclass(frozen=True)
class ToolLimits:
    """Limits on the calls of one tool. The defaults are those of the section ``tools``."""

    timeout_s: float
    max_concurrent: int
    max_result_tokens: int
    truncation: Side


@dataclass(frozen=True)
class ToolMethods:
    """What a tool can do. This is also known of a tool in another process."""

    own: frozenset[str]
    """The methods that it defines itself."""
    taken: Mapping[str, frozenset[str] | None]
    """The names of the arguments of each method that it has; None if it takes any."""

    @classmethod
    def of(cls, tool: Any) -> ToolMethods:
        # In the tools of other frameworks, a method with the name check means something else.
        names = (*METHODS, "check") if isinstance(tool, BaseTool) else METHODS
        own = frozenset(
            name
            for name in names
            if (method := getattr(type(tool), name, None)) is not None and method is not getattr(BaseTool, name)
        )
        return cls(own, {name: _taken(getattr(tool, name)) for name in METHODS if getattr(tool, name, None)})


@dataclass(frozen=True)
class MadeTool:
    """A tool that was made from its entry."""

    tool: Any
    """An object with the methods of ``BaseTool``."""
    schema: ToolSchema
    limits: ToolLimits
    methods: ToolMethods
    place: str
    """Where it is configured, for messages."""


class LoadedTool:
    """A tool, its schema, and the slots in which its methods run."""

    def __init__(self, made: MadeTool, texts: ResultText) -> None:
        self.tool = tool = made.tool
        self.schema = made.schema
        self.name = made.schema.name
        self.limits = limits = made.limits
        self._methods = made.methods
        self._texts = texts
        # A tool may know a lower limit, for example that of the sandbox.
        self._calls = Slots(
            self.name, min(limits.max_concurrent, getattr(tool, "max_concurrent", limits.max_concurrent))
        )
        # Separate slots: a tool whose calls are all blocked must still be released.
        self._releases = Slots(f"{self.name} (release)", limits.max_concurrent, is_patient=True)
        self._background: set[asyncio.Task[Any]] = set()
        self._is_available = True
        self._warned: set[str] = set()

    def has_own(self, method: str) -> bool:
        """Whether the tool defines a method itself. Those that do nothing are not called."""
        return method in self._methods.own

    async def run(self, call: Callable[[], Any], on_late: Callable[[Any], object] | None = None) -> Any:
        """Call a method in a slot. With ``on_late`` it is never interrupted, and a late result is passed on."""
        is_interrupted = on_late is None
        return await self._calls.run(
            lambda: call_method(call, self._note_blocked, interrupt=is_interrupted), self.limits.timeout_s, on_late
        )

    async def run_release(self, call: Callable[[], Any]) -> None:
        """Call ``release``. If all slots are blocked, ``CallTimedOut`` is raised, and it is called when one is free."""
        timeout_s = self.limits.timeout_s
        work = asyncio.ensure_future(
            self._releases.run(lambda: call_method(call, self._note_blocked, interrupt=False), timeout_s)
        )
        self._keep(work)
        while not work.done():
            await asyncio.wait({work}, timeout=2 * timeout_s)
            if not work.done() and self._releases.is_blocked:
                raise CallTimedOut
        work.result()

    def note_unavailable(self, error: ToolUnavailable) -> None:
        """Log the first of several calls that fail one after the other."""
        if self._is_available:
            logger.warning("tool %s is unavailable: %s", self.name, error)
        self._is_available = False

    def note_available(self) -> None:
        if not self._is_available:
            logger.warning("tool %s is available again", self.name)
        self._is_available = True

    def _note_blocked(self, seconds: float) -> None:
        self.warn_once(
            "blocked",
            f"blocked the event loop of all episodes for {seconds:.1f} s; make its methods plain functions, which run "
            "in threads, or await what takes long",
        )

    def warn_once(self, kind: str, text: str) -> None:
        """Log the first problem of a kind. The others are only counted."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("tool %s %s", self.name, text)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self._keep(asyncio.ensure_future(work))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a reference to a task until it has ended, and take note of its error."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(has_succeeded)

    def cut(self, text: str) -> tuple[str, bool]:
        """The text as the model reads it, and whether something was removed."""
        # The whole text is not searched: control tokens outside of what is kept do not matter.
        limits = self.limits
        short = self._texts.truncated(text, limits.max_result_tokens, limits.truncation)
        safe = self._texts.without_control_tokens(short)
        if safe != short:  # it has a few more tokens now
            safe = self._texts.truncated(safe, limits.max_result_tokens, limits.truncation)
        return safe, short != text

    def check_row(self, kwargs: Any, place: str) -> None:
        """Raise ``DataError`` if ``tools_kwargs`` of a row do not fit the methods of the tool."""
        key = f"{place}: tools_kwargs.{self.name}"
        if not isinstance(kwargs, Mapping):
            raise DataError(
                f"{key} = {kwargs!r}: must be a mapping with {', '.join(f'{each}_kwargs' for each in METHODS)}"
            )
        for name, given in kwargs.items():
            method = name.removesuffix("_kwargs")
            if method not in METHODS or method == name:
                known = ", ".join(f"{each}_kwargs" for each in METHODS)
                raise DataError(f"{key}.{name}: no such entry; known: {known}")
            if not isinstance(given, Mapping):
                raise DataError(f"{key}.{name} = {given!r}: must be a mapping of argument names to values")
            if given:
                self._check_takes(method, given, f"{key}.{name}")

    def _check_takes(self, method: str, given: Mapping[str, Any], key: str) -> None:
        if method not in self._methods.taken:
            raise DataError(f"{key}: tool {self.name} has no method {method}; remove it")
        taken = self._methods.taken[method]
        wrong = [name for name in given if taken is not None and name not in taken]
        if wrong or not self.has_own(method):
            names = ", ".join(wrong or given)
            raise DataError(f"{key}: {method} of tool {self.name} does not take {names}; remove it, or add a parameter")

    async def end_background(self, limit_s: float) -> None:
        if self._background:
            await asyncio.wait(set(self._background), timeout=limit_s)


def _taken(function: Any) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None  # some callables have no signature
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY)
