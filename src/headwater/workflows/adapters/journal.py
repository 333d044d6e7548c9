"""What the engine sampled in one episode, for code that sends its own requests and builds its own sequences.

Such code returns tokens and says which of them the model wrote. The journal finds these tokens in the engine's
responses. A trajectory therefore has the log-probs and policy versions that the engine recorded, and tokens that the
engine did not sample in exactly this context are never trained on.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from headwater.core.errors import InvalidTrajectory, RolloutFailed
from headwater.core.media import Media, MediaContent
from headwater.core.records import NOT_SAMPLED, Score, Trajectory
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams, StopReason, derive_key
from headwater.tools.session import ToolSession
from headwater.workflows.adapters.pictures import Pictures
from headwater.workflows.episode import Episode

_SAME_LOGPROB = 1e-3
"""Log-probs may have been rounded to float32 or float16 on their way through a class."""

_DISTRIBUTION = (
    "temperature", "top_k", "top_p", "min_p", "ignore_end", "logit_bias", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "grammar",
)  # fmt: skip
"""Settings that change the probability of a token."""


@dataclass(frozen=True)
class Claim:
    """A sequence that a class returned."""

    tokens: Sequence[int]
    mask: Sequence[int]
    """1 on tokens that the model wrote and that should be trained."""
    logprobs: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    prompt_length: int | None = None
    """None means that the prompt ends before the first token that the engine sampled."""


@dataclass(frozen=True)
class _Answer:
    """A response of the engine, the settings it was sampled with, and the images and videos before it."""

    response: ModelResponse
    sampling: SamplingParams
    media: Media = ()

    def num_shared(self, tokens: Sequence[int], place: int) -> int:
        """How many tokens from ``place`` on are the beginning of this response to the tokens before."""
        if self.response.input_tokens != tuple(tokens[:place]):
            return 0
        count = 0
        for own, other in zip(self.response.output_tokens, tokens[place:], strict=False):
            if own != other:
                break
            count += 1
        return count


class Journal:
    """Sends the requests of one episode and keeps the responses.

        journal = Journal(episode)
        response = await journal.generate(tokens, sampling)
        trajectory = journal.trajectory(Claim(tokens, mask), reward)

    Requests draw from the same keys as the replies of an ``Episode``: the first from the episode's key, later ones from
    keys derived from their number.
    """

    def __init__(self, episode: Episode, pictures: Pictures | None = None) -> None:
        self.episode = episode
        self.pictures = pictures or Pictures(episode.context)
        self.notes: dict[str, Any] = {}
        """Values that the class reports about its episode; they become the ``info`` of the rollout."""
        self._reward_info: dict[str, Any] = {}
        self._name = f"{episode.prompt.uid}#{episode.sample}"
        self.tools: ToolSession | None = None
        """The tools of the episode; None if the run has none."""
        self.tool_schemas: Sequence[Mapping[str, Any]] = ()
        self.newest_version = 0
        """The newest policy version in the responses so far."""
        self._num_requests = 0
        self._answers: dict[int, list[_Answer]] = {}
        """By the number of input tokens."""

    def room(self, num_input: int) -> int:
        """The longest response to a request with this many tokens."""
        context = self.episode.context
        longest_prompt = max(context.max_prompt_tokens, len(self.episode.prompt.tokens))
        left = longest_prompt + context.sampling.max_new_tokens - num_input
        if left < 1:
            raise RolloutFailed(
                f"episode {self._name}: a request of {num_input} tokens leaves no room for a reply within "
                f"data.max_prompt_tokens + rollout.max_new_tokens; raise one of them, or end the episode earlier"
            )
        return min(left, context.sampling.max_new_tokens)

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, contents: Sequence[MediaContent] = ()
    ) -> ModelResponse:
        """``contents`` are all images and videos that ``tokens`` stand for, in order."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        key = self.episode.data.rng_key
        request = ModelRequest(
            request_id=f"{self._name}/{number}" if number else self._name,
            input_tokens=tuple(map(int, tokens)),
            sampling=sampling,
            rng_key=derive_key(key, "turn", number) if number else key,
            session=self.episode.session,
            media=self.pictures.place(tokens, contents, self._sequences()) if contents else (),
        )
        response = await self.episode.engine.agenerate(request)
        if response.stop_reason == "abort":
            raise RolloutFailed(f"request {request.request_id}: the engine aborted it")
        if response.input_tokens != request.input_tokens:
            raise RolloutFailed(f"request {request.request_id}: the engine answered for other input tokens")
        self.record(response, sampling, request.media)
        return response

    def _sequences(self) -> list[tuple[Sequence[int], Media]]:
        """What the model has read, with and without what it wrote then."""
        answers = [answer for several in self._answers.values() for answer in several if answer.media]
        pairs = [(each.response.input_tokens, each.response.output_tokens, each.media) for each in answers]
        return [(tokens, media) for given, made, media in pairs for tokens in (given + made, given)]

    def record(self, response: ModelResponse, sampling: SamplingParams, media: Media = ()) -> None:
        """A response of the engine, also to a request that the journal has not sent itself."""
        self.newest_version = max(self.newest_version, *response.output_versions, 0)
        self._answers.setdefault(len(response.input_tokens), []).append(_Answer(response, sampling, media))

    def note_score(self, score: Score) -> None:
        """What a reward function returned beside the score that the class receives."""
        self.notes.update(score.info)
        self._reward_info.update(score.info)

    def trajectory(self, claim: Claim, score: Score | float, info: Mapping[str, Any] | None = None) -> Trajectory:
        """The trajectory of a claimed sequence. Raises ``InvalidTrajectory`` if the claim is not true."""
        if not isinstance(score, Score):
            score = Score(score)
        found = _Alignment(self._name, claim, self._answers, self.episode.context.sampling)
        tokenizer, prompt = self.episode.context.tokenizer, self.episode.prompt
        start = claim.prompt_length if claim.prompt_length is not None else found.first_sampled
        text = tokenizer.decode(list(claim.tokens[start:]), skip_special_tokens=True)
        last = tokenizer.decode(list(claim.tokens[found.last_start :]), skip_special_tokens=True)
        return Trajectory(
            uid=prompt.uid,
            sample=self.episode.sample,
            tokens=tuple(claim.tokens),
            prompt_length=start,
            loss_mask=tuple(claim.mask),
            logprobs=tuple(found.logprobs),
            versions=tuple(found.versions),
            reward=score.value,
            stop_reason=found.stop_reason,
            info={**score.info, "response_text": last, "num_turns": found.num_turns, **self.notes, **(info or {})},
            messages=(*prompt.messages, {"role": "assistant", "content": text}),
            reward_info={**self._reward_info, **score.info},
            media=found.media,
        )


class _Alignment:
    """Where the tokens of a claim come from."""

    def __init__(
        self, name: str, claim: Claim, answers: Mapping[int, list[_Answer]], trained_with: SamplingParams
    ) -> None:
        self._name, self._claim, self._answers, self._trained_with = name, claim, answers, trained_with
        length = len(claim.tokens)
        self._check_lengths(length)
        self.logprobs = [0.0] * length
        self.versions = [NOT_SAMPLED] * length
        self.stop_reason: StopReason = "stop"
        self.num_turns = 0
        self.media: Media = ()
        """Images and videos before the last response."""
        self.first_sampled = length
        self.last_start = length
        """The first token of the last response."""
        place = 1  # a request has at least one token, so the first one is given
        while place < length:
            answer, count = self._find(place)
            if answer is None:
                self._check_given(place)
                place += 1
            else:
                self._take(answer, place, count)
                place += count
        if not any(claim.mask):
            raise InvalidTrajectory(f"episode {name}: no token is marked as the model's, so there is nothing to train")

    def _check_lengths(self, length: int) -> None:
        columns = {"mask": self._claim.mask, "log-probs": self._claim.logprobs, "versions": self._claim.versions}
        for what, column in columns.items():
            if column is not None and len(column) != length:
                raise InvalidTrajectory(
                    f"episode {self._name}: {length} tokens and {len(column)} entries of the {what}; return one each"
                )
        if length < 2:
            raise InvalidTrajectory(f"episode {self._name}: a sequence of {length} tokens has no prompt and response")

    def _find(self, place: int) -> tuple[_Answer | None, int]:
        """The response whose beginning stands at ``place``: the longest, then the one with the claimed log-probs."""
        tokens = self._claim.tokens
        found = [(answer.num_shared(tokens, place), answer) for answer in self._answers.get(place, ())]
        most = max((count for count, _ in found), default=0)
        if most == 0:
            return None, 0
        longest = [answer for count, answer in found if count == most]
        return next((each for each in longest if self._disagreement(each, place, most) is None), longest[0]), most

    def _check_given(self, place: int) -> None:
        if self._claim.mask[place]:
            raise InvalidTrajectory(
                f"episode {self._name}: token {place} is marked as the model's, but the engine did not sample it after "
                "the tokens before it; append the sampled tokens unchanged, and mark everything else with 0"
            )

    def _take(self, answer: _Answer, place: int, count: int) -> None:
        is_trained = any(self._claim.mask[place : place + count])
        if is_trained and (problem := self._disagreement(answer, place, count) or self._other_policy(answer)):
            raise InvalidTrajectory(f"episode {self._name}: {problem}")
        if answer.media[: len(self.media)] != self.media:
            raise InvalidTrajectory(
                f"episode {self._name}: the replies of one sequence were sampled with different images; send all "
                "images of the conversation with every request"
            )
        self.media = answer.media
        response = answer.response
        self.logprobs[place : place + count] = response.output_logprobs[:count]
        self.versions[place : place + count] = response.output_versions[:count]
        self.stop_reason = response.stop_reason if count == len(response.output_tokens) else "length"
        self.num_turns += 1
        self.first_sampled = min(self.first_sampled, place)
        self.last_start = place

    def _disagreement(self, answer: _Answer, place: int, count: int) -> str | None:
        """How the claimed log-probs and versions differ from the engine's."""
        claim, response = self._claim, answer.response
        for offset in range(count):
            at = place + offset
            if not claim.mask[at]:
                continue
            if claim.versions is not None and claim.versions[at] != response.output_versions[offset]:
                return (
                    f"token {at} has policy version {claim.versions[at]}, but version "
                    f"{response.output_versions[offset]} sampled it; return the versions of the response"
                )
            if claim.logprobs is not None and not math.isclose(
                claim.logprobs[at], response.output_logprobs[offset], rel_tol=_SAME_LOGPROB, abs_tol=_SAME_LOGPROB
            ):
                return (
                    f"token {at} has log-prob {claim.logprobs[at]:g}, but the engine recorded "
                    f"{response.output_logprobs[offset]:g}; return the log-probs of the response"
                )
        return None

    def _other_policy(self, answer: _Answer) -> str | None:
        """How a response was sampled from another distribution than the one the learner computes."""
        for name in _DISTRIBUTION:
            used, expected = getattr(answer.sampling, name), getattr(self._trained_with, name)
            if used != expected:
                return (
                    f"trained tokens were sampled with {name} = {used}, and the recipe has {expected}; use the given "
                    "sampling settings for them, or mark them with 0"
                )
        if answer.sampling.min_new_tokens > self._trained_with.min_new_tokens:
            return "trained tokens were sampled with a larger min_new_tokens than the recipe has; set it in the recipe"
        return None


_current: ContextVar[Journal] = ContextVar("headwater_journal")
"""The journal of the episode that the present task runs."""


@asynccontextmanager
async def open_journal(episode: Episode, pictures: Pictures | None = None) -> AsyncIterator[Journal]:
    """The journal of an episode, which ``current_journal`` returns inside this block and in tasks started there.

    If the run has tools, those of the episode are open inside this block.
    """
    journal = Journal(episode, pictures)
    token = _current.set(journal)
    toolbox = episode.context.tools
    try:
        if toolbox is None:
            yield journal
            return
        async with toolbox.open(episode.prompt) as journal.tools:
            journal.tool_schemas = toolbox.schemas(episode.prompt)
            yield journal
    finally:
        _current.reset(token)


def current_journal() -> Journal | None:
    return _current.get(None)
