"""An agent of your own, or any program that takes a base URL, as a rollout: see docs/endpoint.md.

Each episode has its own OpenAI address. What the agent asks there is answered by the policy and recorded by token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from headwater.chat.parsers import ToolCallParser, make_parser
from headwater.config.constraints import AtLeast, MoreThan, Within
from headwater.core.errors import AgentFailed, AgentTimedOut, ConfigError, RewardFailed
from headwater.core.records import Score, Trajectory, reward_number
from headwater.core.registry import similar_path
from headwater.core.requests import derive_key
from headwater.core.waits import named_wait
from headwater.serving.openai.responses import completion_id
from headwater.workflows import WORKFLOWS, Episode, WorkflowContext
from headwater.workflows.agents.processes import AgentProcesses
from headwater.workflows.agents.runner import AgentEnd, AgentRunner, AgentSettings, Invitation
from headwater.workflows.agents.server import MODEL_NAME, EndpointServer
from headwater.workflows.agents.session import Session, SessionRules
from headwater.workflows.agents.threads import AgentThreads
from headwater.workflows.agents.transcript import TurnPoint

log = logging.getLogger(__name__)

_ARGUMENTS = "rollout.workflow_args"
_DETAIL_SHOWN = 2000
"""How many characters of a traceback or of an agent's output an error shows."""
_REWARD_KEYS = ("reward", "score")
_NOT_REFUSED = ("answered", "disconnected", "engine_failed")
"""Ways in which a call ends that are not refusals."""


@WORKFLOWS.register
class EndpointWorkflow:
    """Give the episode an address, run the agent, and turn what was said there into trajectories."""

    def __init__(
        self,
        context: WorkflowContext,
        *,
        agent: str = "",
        agent_args: Mapping[str, Any] | None = None,
        command: str | tuple[str, ...] = (),
        run_in: Literal["process", "thread"] = "process",
        python: str = "",
        timeout_s: Annotated[float, MoreThan(0)] = 600.0,
        wait_for_finish: bool = False,
        reward: Literal["auto", "agent", "function"] = "auto",
        truncated_reward: float | None = None,
        train_on: Literal["all", "last"] = "all",
        max_turns: Annotated[int, AtLeast(1)] = 64,
        max_concurrent: Annotated[int, AtLeast(0, "use 0 for no limit")] = 0,
        client_sampling: Literal["ignore", "refuse"] = "ignore",
        client_grammar: Literal["follow", "ignore", "refuse"] = "follow",
        parser: str = "auto",
        host: str = "127.0.0.1",
        port: Annotated[int, Within(0, 65535)] = 0,
        public_url: str = "",
    ) -> None:
        argv = tuple(shlex.split(command) if isinstance(command, str) else command)
        _check(agent, argv, run_in, python, public_url)
        settings = AgentSettings(agent, dict(agent_args or {}), argv, python)
        self._context = context
        self._runner: AgentRunner = AgentProcesses(settings) if run_in == "process" else AgentThreads(settings)
        self._timeout_s = timeout_s
        self._wait_for_finish = wait_for_finish
        self._reward = reward
        self._truncated_reward = truncated_reward
        self._train_on = train_on
        self._address = host, port, public_url
        self._parser_name = parser
        self._rules = SessionRules(max_turns, client_sampling, client_grammar, lambda: self._parser, set())
        self._slots = asyncio.Semaphore(max_concurrent) if max_concurrent else None

    async def run(self, episode: Episode) -> list[Trajectory]:
        server = await EndpointServer.here(*self._address)
        began = time.monotonic()
        async with server.session(episode, self._rules) as session:
            seed = derive_key(episode.data.rng_key, "agent") % 2**32
            invitation = Invitation(server.base_url(session), session.key, MODEL_NAME, episode.prompt, seed)
            end = await self._run_agent(episode, session, invitation)
        info = {
            "num_turns": session.transcript.num_replies,
            "agent_calls": dict(session.counts),
            "agent_s": time.monotonic() - began,
            "ended_by": session.limit or "agent",
        }
        self._check_end(episode, session, end)
        made = await self._trajectories(episode, session, end, info)
        trained = [each for each in made if any(each.loss_mask)]
        if made and not trained:
            raise AgentFailed(
                f"the agent of row {episode.prompt.uid}: all its replies had to match a response_format or a required "
                "tool call, and such replies are not trained; let it ask for plain replies, too, or set "
                f"{_ARGUMENTS}.client_grammar=ignore"
            )
        # The first piece has the refused calls, so that they are counted once: those of this episode, and those since
        # the last one that belong to no running episode.
        refused = Counter({code: count for code, count in session.counts.items() if code not in _NOT_REFUSED})
        refused.update(server.take_refusals())
        if refused and trained:
            trained[0] = replace(trained[0], info={**trained[0].info, "refused_calls": dict(refused)})
        return trained

    @cached_property
    def _parser(self) -> ToolCallParser:
        return make_parser(self._parser_name, self._context.tokenizer, f"{_ARGUMENTS}.parser")

    async def _run_agent(self, episode: Episode, session: Session, invitation: Invitation) -> AgentEnd:
        if self._slots is None:
            return await self._until_finished(episode, session, invitation)
        if self._slots.locked():
            episode.data.state.begin_late()
        async with self._slots:
            return await self._until_finished(episode, session, invitation)

    async def _until_finished(self, episode: Episode, session: Session, invitation: Invitation) -> AgentEnd:
        began = time.monotonic()
        with episode.doing("running its agent"):
            end = await self._runner.run(invitation, self._timeout_s)
            if not self._wait_for_finish or end.outcome != "returned":
                return end
            left_s = max(0.0, self._timeout_s - (time.monotonic() - began))
            try:
                async with asyncio.timeout(left_s):
                    await named_wait(
                        session.is_finished.wait(),
                        lambda: f"episode {episode.name} waits for the call 'finish' of its agent",
                        kind="agent_finish",
                        hard_limit_s=math.inf,
                    )
            except TimeoutError:
                return AgentEnd("timed_out", reason=f"did not call finish within {self._timeout_s:g} s")
            return end

    def _check_end(self, episode: Episode, session: Session, end: AgentEnd) -> None:
        """Raise if the episode cannot be used, with the error that caused it."""
        where = f"the agent of row {episode.prompt.uid}, sample {episode.sample}"
        detail = f"\n{end.detail[-_DETAIL_SHOWN:].strip()}" if end.detail.strip() else ""
        if end.outcome == "timed_out":
            raise AgentTimedOut(
                f"{where} {end.reason}; raise {_ARGUMENTS}.timeout_s, or let it give up earlier{detail}"
            )
        if end.outcome != "returned":
            if session.engine_error is not None:
                raise session.engine_error
            if session.limit is None:
                raise AgentFailed(f"{where} {end.reason}{detail}")
            # The model used up its room or its turns, and the agent gave up: an episode like any other.
        if not session.transcript.num_replies:
            refused = f"; its calls ended as {dict(session.counts)}" if session.counts else ""
            raise AgentFailed(f"{where} got no reply from the model: it must call {{base_url}}{refused}{detail}")

    # Rewards

    async def _trajectories(
        self, episode: Episode, session: Session, end: AgentEnd, info: dict[str, Any]
    ) -> list[Trajectory]:
        transcript = session.transcript
        leaves = transcript.leaves()
        last = transcript.last
        assert last is not None
        given = self._given(episode, session, end)
        if isinstance(given, dict):
            if self._train_on == "last":
                leaves = [leaf for leaf in leaves if last in leaf.path()]
            return _by_completion(episode, leaves, given, info)
        final = next(leaf for leaf in leaves if last in leaf.path())
        assert final.episode is not None
        if session.limit is not None:
            final.episode.stop_reason = "length"
        score = given if given is not None else await final.episode.score()
        chosen = leaves if self._train_on == "all" else [final]
        info = {**info, "num_pieces": len(chosen)}
        return [leaf.episode.finish(score, info=info) for leaf in chosen if leaf.episode is not None]

    def _given(self, episode: Episode, session: Session, end: AgentEnd) -> Score | dict[str, float] | None:
        """The reward that the agent gave: one number, or one for each completion. None means the run's function."""
        if self._reward == "function":
            return None
        value = session.given if session.given is not None else end.value
        where = f"row {episode.prompt.uid}: the reward of the agent"
        try:
            given = _read_reward(value, session, where)
        except (TypeError, ValueError) as error:
            raise RewardFailed(str(error)) from error
        if given is not None:
            return given
        if session.limit is not None and self._truncated_reward is not None:
            return Score(self._truncated_reward)
        if self._reward == "agent":
            remedy = f"; set {_ARGUMENTS}.truncated_reward" if session.limit else ""
            raise RewardFailed(f"{where} is missing: let it return a number, or post one{remedy}")
        return None


def _read_reward(value: Any, session: Session, where: str) -> Score | dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return Score(reward_number(value, where))
    key = next((name for name in _REWARD_KEYS if value.get(name) is not None), None)
    if key is not None:
        rest = {name: each for name, each in value.items() if name != key}
        return Score(reward_number(value[key], where), rest)
    ids = session.transcript.completion_ids()
    value = {completion_id(str(name)): each for name, each in value.items()}
    if value and all(name in ids for name in value):
        return {name: reward_number(each, where) for name, each in value.items()}
    raise TypeError(
        f"{where} is a mapping with {', '.join(map(str, list(value)[:5])) or 'nothing'}: return a number, a mapping "
        "with 'reward', or one from ids of completions to numbers"
    )


def _by_completion(
    episode: Episode, leaves: list[TurnPoint], rewards: Mapping[str, float], info: dict[str, Any]
) -> list[Trajectory]:
    """Trajectories with a reward per reply. Pieces of which no reply was named are left out."""
    trajectories = []
    for leaf in leaves:
        named = [node.completion_id for node in reversed(list(leaf.path()))]
        if leaf.episode is not None and any(name in rewards for name in named):
            scores = [rewards.get(name, 0.0) for name in named]
            trajectories.append(leaf.episode.finish(sum(scores), turn_scores=scores, info=info))
    return trajectories


def _check(agent: str, command: tuple[str, ...], run_in: str, python: str, public_url: str) -> None:
    problems = []
    if bool(agent) == bool(command):
        both = "both are given" if agent else "neither is given"
        problems.append(f"{_ARGUMENTS}: {both}; give agent ('file.py:function') or command, not both")
    file = agent.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).expanduser().is_file():
        problems.append(f"{_ARGUMENTS}.agent = {agent}: no such file{similar_path(Path(file))}")
    if agent and not file:
        problems.append(f"{_ARGUMENTS}.agent = {agent}: write it as 'file.py:function' or 'package.module:function'")
    if command and run_in == "thread":
        problems.append(f"{_ARGUMENTS}.run_in = thread: a command runs in a process; remove run_in")
    if python and (command or run_in == "thread"):
        problems.append(f"{_ARGUMENTS}.python = {python}: is for agents in processes; remove it")
    if public_url and not public_url.startswith(("http://", "https://")):
        problems.append(f"{_ARGUMENTS}.public_url = {public_url}: must begin with http:// or https://")
    if problems:
        raise ConfigError(problems)
