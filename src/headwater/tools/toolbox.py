"""``Toolbox``: the tools of a run.

toolbox = Toolbox(config.tools, config.sandbox, tokenizer)
async with toolbox.open(prompt) as session:
    result = await session.call(ToolCall("1", "calculator", {"expression": "6 * 7"}))
await toolbox.close()
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.errors import ConfigError, DataError, HeadwaterError
from headwater.core.protocols import Tokenizer
from headwater.core.records import Prompt
from headwater.core.registry import nearest
from headwater.core.waits import start_in_thread, wait_for_future
from headwater.data.media import MediaSettings
from headwater.tools.config import ToolEntry, read_entries
from headwater.tools.loaded import LoadedTool, MadeTool
from headwater.tools.making import ToolMaker
from headwater.tools.result_text import ResultText
from headwater.tools.running import call_method
from headwater.tools.schema import OfferedTools
from headwater.tools.session import ToolSession

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CHECK_LIMIT_S = 120.0
"""Limit for asking all services whether they work, before a run."""
_CLOSE_LIMIT_S = 10.0


class MakesTools(Protocol):
    """Makes the tools of a run, and closes what they share."""

    @property
    def start_limit_s(self) -> float:
        """Limit for making all of them."""
        ...

    async def make(self, entries: Sequence[ToolEntry]) -> list[MadeTool]: ...
    async def close(self, limit_s: float) -> None: ...


class Toolbox:
    """All tools of a run. Its sessions must run on one event loop."""

    def __init__(
        self,
        config: ToolsConfig,
        sandbox: SandboxConfig,
        tokenizer: Tokenizer,
        tools: Sequence[Any] = (),
        maker: MakesTools | None = None,
        media: MediaSettings | None = None,
    ) -> None:
        """``tools`` are objects, classes and functions, in addition to those that ``config`` names. ``maker`` makes all
        of them elsewhere than in this process. ``media`` says how images and videos of results are read; None if the
        model takes only text."""
        self.counts: Counter[str] = Counter()
        """Calls and failures of all sessions; see ``ToolSession.counts``."""
        self._maker = maker or ToolMaker(config, sandbox)
        made = run_apart(self._maker.make(read_entries(config, tools)), "starting the tools", self._maker.start_limit_s)
        self._tools = _by_name(made, ResultText(tokenizer))
        self._is_closed = False
        self._media = media
        self.offered = OfferedTools({name: loaded.schema.as_dict() for name, loaded in self._tools.items()})
        """Which tools a row offers to the model. Prompts are rendered with it, also in other processes."""

    @classmethod
    def from_config(
        cls,
        config: ToolsConfig,
        sandbox: SandboxConfig,
        tokenizer: Tokenizer,
        maker: MakesTools | None = None,
        media: MediaSettings | None = None,
    ) -> Toolbox | None:
        """The tools of a recipe, asked whether they work; None if the recipe has no tools."""
        if not config.use and not config.config:
            return None
        toolbox = cls(config, sandbox, tokenizer, maker=maker, media=media)
        try:
            toolbox.check()
        except BaseException:
            toolbox.close_unused()
            raise
        return toolbox

    @property
    def runs_code(self) -> bool:
        """Whether a tool uses the sandbox. True if the tools are made elsewhere."""
        return not isinstance(self._maker, ToolMaker) or self._maker.runs_code

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def check(self) -> None:
        """Raise ``HeadwaterError`` if a tool cannot work, for example because the URL of its service is wrong."""

        async def check_all() -> None:
            problems = []
            for name, loaded in self._tools.items():
                if not loaded.has_own("check"):
                    continue
                try:
                    await call_method(loaded.tool.check)
                except HeadwaterError as error:
                    problems.append(f"tool {name}: {error}")
            if problems:
                raise ConfigError(problems)

        run_apart(check_all(), "checking the tools")

    def schemas(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The OpenAI function schemas of the tools of a row, in the order of the settings."""
        return [dict(self.offered.schemas[name]) for name in self._selected(prompt)]

    def check_row(self, prompt: Prompt) -> None:
        """Raise ``DataError`` if a row names tools or arguments that do not exist."""
        place = f"row {prompt.uid}"
        self._selected(prompt)
        for name, kwargs in prompt.tools_kwargs.items():
            if name not in self._tools:
                raise DataError(
                    f"{place}: tools_kwargs names the tool {name!r}, which is not in tools.use or tools.config; "
                    f"{nearest(name, self.names)}"
                )
            self._tools[name].check_row(kwargs, place)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[ToolSession]:
        """The tools of one episode. Leaving the block releases them, also after an error or a cancellation."""
        self.check_row(prompt)
        session = ToolSession(self._selected(prompt), prompt, self.counts, self._media)
        try:
            yield session
        finally:
            await _to_its_end(session.release())

    async def close(self) -> None:
        """End the services of all tools. Call it on the event loop of the sessions. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for loaded in self._tools.values():
            await loaded.end_background(_CLOSE_LIMIT_S)
        await self._maker.close(_CLOSE_LIMIT_S)

    def close_unused(self) -> None:
        """End the services of tools that no session has used, from any thread."""
        run_apart(self.close(), "ending the tools")

    def _selected(self, prompt: Prompt) -> dict[str, LoadedTool]:
        try:
            return {name: self._tools[name] for name in self.offered.select(prompt.extra_info)}
        except DataError as error:
            raise DataError(f"row {prompt.uid}: {error}") from error


def _by_name(made: Sequence[MadeTool], texts: ResultText) -> dict[str, LoadedTool]:
    tools: dict[str, LoadedTool] = {}
    places: dict[str, str] = {}
    for each in made:
        name = each.schema.name
        if name in tools:
            raise ConfigError(
                [f"{each.place}: the name {name!r} is taken by {places[name]}; change the name in one schema"]
            )
        tools[name] = LoadedTool(each, texts)
        places[name] = each.place
    return tools


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait until ``work`` has ended, even if the caller is cancelled meanwhile; it has its own time limits."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def run_apart(work: Coroutine[Any, Any, T], what: str, limit_s: float = _CHECK_LIMIT_S) -> T:
    """Run a coroutine on a separate event loop in another thread, and wait for its result.

    Tools are made and checked before the event loop of the episodes exists.
    """
    future = start_in_thread(lambda: asyncio.run(work), "tools-check")
    return wait_for_future(future, lambda: what, kind="tools", hard_limit_s=limit_s)
