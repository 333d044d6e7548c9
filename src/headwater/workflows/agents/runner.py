"""What an agent is given, how it may end, and who runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from headwater.core.records import Prompt
from headwater.data.message_media import with_data_urls
from headwater.workflows.agents.conversation import text_of
from headwater.workflows.agents.fork_server import plain

Outcome = Literal["returned", "raised", "exited", "killed", "timed_out"]

OFFERED = ("base_url", "api_key", "model", "data", "messages", "prompt", "ground_truth", "seed")
"""The arguments that an agent may take."""


@dataclass(frozen=True)
class Invitation:
    """What an agent is given for one episode."""

    base_url: str
    api_key: str
    model: str
    prompt: Prompt
    seed: int
    """Derived from the episode's random key."""

    def offered(self) -> dict[str, Any]:
        """The arguments for a Python agent, by name (``OFFERED``)."""
        data = self._row()
        return {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "model": self.model,
            "data": data,
            "messages": data["messages"],
            "prompt": self._question(),
            "ground_truth": self.prompt.ground_truth,
            "seed": self.seed,
        }

    def env(self) -> dict[str, str]:
        """The variables that OpenAI's clients read."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}

    def fill(self, argv: tuple[str, ...]) -> list[str]:
        """A command with ``{base_url}`` and the like replaced."""
        values = {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "model": self.model,
            "uid": self.prompt.uid,
            "prompt": self._question(),
            "seed": str(self.seed),
        }
        filled = []
        for part in argv:
            for name, value in values.items():
                part = part.replace(f"{{{name}}}", value)
            filled.append(part)
        return filled

    def row_as_json(self) -> Any:
        return plain(self._row())

    def _row(self) -> dict[str, Any]:
        prompt = self.prompt
        return {
            **prompt.columns,
            "uid": prompt.uid,
            "data_source": prompt.data_source,
            "messages": [dict(each) for each in with_data_urls(prompt.messages, prompt.media)],
            "prompt": self._question(),
            "ground_truth": prompt.ground_truth,
            "extra_info": dict(prompt.extra_info),
        }

    def _question(self) -> str:
        """The text of the last user message."""
        asked = [each for each in self.prompt.messages if each.get("role") == "user"]
        return text_of((asked or self.prompt.messages)[-1].get("content"))


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended."""

    outcome: Outcome
    value: Any = None
    """What it returned: None, a number, or a mapping."""
    reason: str = ""
    """In words, unless it returned."""
    detail: str = ""
    """A traceback, or the last lines that it printed."""


@dataclass(frozen=True)
class AgentSettings:
    """Which agent runs, and how."""

    agent: str = ""
    """``file.py:function``, or ``package.module:Class``."""
    agent_args: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    python: str = ""
    """The interpreter of the agent's process; empty means this one."""


class AgentRunner(Protocol):
    """Runs agents. Cancelling ``run`` ends the agent, if that is possible."""

    async def run(self, invitation: Invitation, timeout_s: float) -> AgentEnd: ...
