"""``ArealOpenAI``: OpenAI's client whose model is the policy, for workflows that use it in ``arun_episode``.

    client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer)
    completion = await client.chat.completions.create(messages=data["messages"], model="default")
    client.set_reward(completion.id, 1.0)
    return client.export_interactions(style="concat")

Requests do not leave the process: they are answered as those of the workflow ``endpoint``, and recorded by token.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headwater.chat.parsers import ToolCallParser, make_parser
from headwater.core.errors import HeadwaterError, InvalidTrajectory, RolloutFailed
from headwater.core.requests import ModelRequest, ModelResponse
from headwater.serving.errors import api_error
from headwater.serving.openai.responses import completion_id
from headwater.workflows.adapters.journal import Journal, current_journal
from headwater.workflows.agents.api import answer_call
from headwater.workflows.agents.session import Session, SessionRules
from headwater.workflows.agents.transcript import TurnPoint

try:
    import httpx
    import openai
except ImportError as error:
    raise HeadwaterError("ArealOpenAI needs OpenAI's client; run: pip install openai") from error

_MAX_TURNS = 1024
_noted: set[str] = set()
"""Settings of clients that the log has said are replaced."""


@dataclass(frozen=True)
class _RecordingEngine:
    """The engine of an episode. Its responses are entered into the journal, which checks what the workflow returns."""

    journal: Journal

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await self.journal.episode.engine.agenerate(request)
        self.journal.record(response, request.sampling, request.media)
        return response


class _Transport(httpx.AsyncBaseTransport):
    """Answers the client's requests from the session of the episode."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            body = json.loads(await request.aread() or b"{}")
            answer = await answer_call(self._session, request.url.path.rpartition("/v1/")[2], body)
        except HeadwaterError as error:
            made = api_error(error)
            return httpx.Response(made.status, json=made.body(), request=request)
        if not answer.is_stream:
            return httpx.Response(200, json=answer.body, request=request)
        return httpx.Response(
            200, headers={"Content-Type": "text/event-stream"}, stream=_Lines(answer.lines()), request=request
        )


class _Lines(httpx.AsyncByteStream):
    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for line in self._lines:
            yield line

    async def aclose(self) -> None:
        await self._lines.aclose()


@dataclass
class Interaction:
    """One reply of the model, with the tokens before it."""

    node: TurnPoint
    reward: float = 0.0
    is_whole: bool = False
    """Whether all replies before this one are trained with it (``concat``), or only this one (``individual``)."""

    @property
    def interaction_id(self) -> str:
        return self.node.completion_id

    @property
    def output_message_list(self) -> list[Mapping[str, Any]]:
        return [self.node.message]

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """The tokens of one trajectory, ``[1, tokens]``."""
        episode = self.node.holder().episode
        assert episode is not None
        made = episode.branch(turn=self.node.turn, label=f"export-{self.node.completion_id}").finish(self.reward)
        mask = list(made.loss_mask)
        if not self.is_whole:
            response = episode.branch(turn=self.node.turn, label="").response
            assert response is not None
            mask[: len(response.input_tokens)] = [0] * len(response.input_tokens)
        return {
            "input_ids": torch.tensor([made.tokens]),
            "loss_mask": torch.tensor([mask]),
            "logprobs": torch.tensor([made.logprobs]),
            "versions": torch.tensor([made.versions]),
            "attention_mask": torch.ones((1, len(made.tokens)), dtype=torch.long),
            "rewards": torch.tensor([self.reward]),
        }


class ArealOpenAI(openai.AsyncOpenAI):
    """One object for each episode."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Any = None,
        tool_call_parser: str | None = None,
        chat_template_type: str = "hf",
        **kwargs: Any,
    ) -> None:
        journal = current_journal()
        if journal is None:
            raise RolloutFailed("ArealOpenAI: make the client in arun_episode, with the engine that it is given")
        episode = journal.episode.copy()
        episode.engine = _RecordingEngine(journal)
        context = journal.episode.context

        def parser() -> ToolCallParser:
            return make_parser(tool_call_parser or "auto", context.tokenizer, "tool_call_parser")

        rules = SessionRules(_MAX_TURNS, "ignore", "follow", parser, _noted)
        self._session = Session(episode, rules)
        self._rewards: dict[str, float] = {}
        super().__init__(
            base_url="http://episode/v1",
            api_key=self._session.key,
            http_client=httpx.AsyncClient(transport=_Transport(self._session)),
            max_retries=0,
        )

    def set_reward(self, id: str, reward: float) -> None:
        """The reward of one completion."""
        if completion_id(id) not in self._session.transcript.completion_ids():
            raise InvalidTrajectory(f"set_reward: there is no completion {id!r} in this episode")
        self._rewards[completion_id(id)] = float(reward)

    def set_last_reward(self, reward: float) -> None:
        """The reward of the newest completion."""
        last = self._session.transcript.last
        if last is None:
            raise InvalidTrajectory("set_last_reward: the model has not answered yet")
        self._rewards[last.completion_id] = float(reward)

    set_final_reward = set_last_reward

    def apply_reward_discount(self, turn_discount: float = 1.0) -> dict[str, Interaction]:
        """Add to each reward the discounted one of the completion that came after it, and return all of them."""
        later = 0.0
        for node in reversed(self._session.transcript.replies):
            later = self._rewards.get(node.completion_id, 0.0) + turn_discount * later
            self._rewards[node.completion_id] = later
        return self.export_interactions("individual")

    def export_interactions(
        self, style: Literal["individual", "concat"] = "individual", **options: Any
    ) -> dict[str, Interaction]:
        """``individual``: a trajectory for each reply. ``concat``: one for each conversation, with all its replies."""
        transcript = self._session.transcript
        nodes = transcript.leaves() if style == "concat" else transcript.replies
        return {
            node.completion_id: Interaction(node, self._rewards.get(node.completion_id, 0.0), style == "concat")
            for node in nodes
        }

    export_completions = export_interactions

    def get_interaction(self, id: str) -> Interaction | None:
        return self.export_interactions().get(id)
