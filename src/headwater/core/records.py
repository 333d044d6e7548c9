"""The typed records that cross folder boundaries.

They hold plain Python values, so they can be created and checked without torch. Lengths are checked at construction,
so an existing record is consistent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal

from headwater.core.media import Media

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

StopReason = Literal["stop", "length", "tool_calls", "abort"]

NOT_SAMPLED = -1
"""Policy version of tokens that the policy did not produce: prompt, template and tool tokens."""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
"""Searching for the stop strings of one request delays all others, so a request may not have too many of them."""

_NUM_CHARACTERS_SHOWN = 40


class DropKind(StrEnum):
    """Why a group of samples is not trained on. Ledger, metrics and doctor use this value, never the message."""

    FAILED = "failed"
    """The workflow raised an error."""
    INVALID = "invalid"
    """The workflow returned something that is not a trajectory, or one that cannot be trained on."""
    ENGINE_FAILED = "engine_failed"
    """The engine could not answer a request."""
    AGENT_FAILED = "agent_failed"
    """An agent of the workflow ``endpoint`` raised, ended with an error, was killed, or never called the model."""
    AGENT_TIMED_OUT = "agent_timed_out"
    """An agent of the workflow ``endpoint`` did not end within its time limit."""
    REWARD_FAILED = "reward_failed"
    """The reward raised an error or returned something that is not a number."""
    REWARD_TIMED_OUT = "reward_timed_out"
    """A reward took longer than ``reward.timeout_s``."""
    TIMED_OUT = "timed_out"
    """The episodes took longer than ``rollout.episode_timeout_s``."""
    REJECTED = "rejected"
    """The workflow returned None."""
    FILTERED = "filtered"
    """All samples have the same reward, so there is nothing to learn (``algorithm.filter_groups``)."""
    REFUSED = "refused"
    """``rollout.should_accept`` returned false."""
    STALE = "stale"
    """The group is older than ``rollout.max_staleness`` allows."""

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong. Filtered, refused and stale groups are an expected part of training."""
        return self not in (DropKind.FILTERED, DropKind.REFUSED, DropKind.STALE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row, rendered and tokenised."""

    uid: str
    """Stable identifier of the row, for example ``arithmetic/train/17``."""
    messages: tuple[Mapping[str, Any], ...]
    """The chat before rendering. ``content`` is a string, or a list of parts if the row has images or videos."""
    text: str
    """The output of the chat template."""
    tokens: tuple[int, ...]
    data_source: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_schemas: tuple[Mapping[str, Any], ...] = ()
    """The tools that the prompt offers to the model, as OpenAI function schemas."""
    media: Media = ()
    """Images and videos, and the tokens that stand for them."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row, for workflows and reward functions; and ``prompt``, if it is a plain string."""
    source: str = ""
    """The entry of ``data.train`` or ``data.eval`` that has the row, by its name in metrics."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"prompt {self.uid!r} has no tokens")


SamplingFeature = Literal["logit_bias", "penalties", "grammar", "top_logprobs", "prompt_logprobs"]
"""Settings of a request beyond temperature, truncation and stops. ``Capabilities`` says which an engine has."""

MAX_TOP_LOGPROBS = 20
"""The largest number of alternatives per token, as in OpenAI's API."""
MAX_LOGIT_BIAS = 4096
"""The largest number of tokens that one request may bias."""

GrammarKind = Literal["json_schema", "regex", "lark"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "lark")

Alternatives = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their log-probs, the most likely first."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of a response must match."""

    kind: GrammarKind
    text: str
    """A JSON schema as JSON, a regular expression for the whole text, or a grammar in the Lark syntax of llguidance."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one response. ``temperature`` 0 is greedy decoding."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Sample from the k most likely tokens; 0 means all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, in addition to the model's end token."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the response. The token that completes the string is the last token of the response."""
    ignore_end: bool = False
    """Ignore the model's end token, as benchmarks do. Stop tokens and stop strings still end the response."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the response contains."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for every time the response contains it."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the response are divided by this if positive, and multiplied if negative."""
    grammar: Grammar | None = None
    """Only tokens that continue a text of this grammar are sampled."""
    num_top_logprobs: int = 0
    """How many alternatives to return for every sampled token, and for every prompt token with ``prompt_logprobs``."""
    prompt_logprobs: bool = False
    """Also return the log-probs of the prompt's tokens. ``max_new_tokens`` may then be 0."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < (0 if self.prompt_logprobs else 1):
            raise ValueError(
                f"max_new_tokens = {self.max_new_tokens}: must be >= 1, or 0 with prompt_logprobs to score the prompt"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature = {self.temperature}: must be finite and >= 0")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: must be >= 0; use 0 to keep all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be in (0, 1]; use 1 to keep all tokens")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p = {self.min_p}: must be in [0, 1); use 0 to keep all tokens")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(f"min_new_tokens = {self.min_new_tokens}: must be in [0, max_new_tokens]")
        if wrong := [text for text in self.stop_strings if not isinstance(text, str)]:
            raise ValueError(f"stop_strings contains {wrong[0]!r}: must be strings; use stop_token_ids for token ids")
        if "" in self.stop_strings:
            raise ValueError(
                "stop_strings contains an empty string, which would end every response immediately; remove it"
            )
        if self.uses_guide or self.prompt_logprobs:  # most requests use none of these settings
            self._check_guide()

    @property
    def uses_guide(self) -> bool:
        """Whether sampling needs more than the settings that ``features`` leaves out."""
        return bool(
            self.logit_bias
            or self.num_top_logprobs
            or self.grammar is not None
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
        )

    @property
    def features(self) -> tuple[SamplingFeature, ...]:
        """The features that an engine must have for these settings."""
        used: dict[SamplingFeature, bool] = {
            "logit_bias": bool(self.logit_bias),
            "penalties": bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1),
            "grammar": self.grammar is not None,
            "top_logprobs": self.num_top_logprobs > 0,
            "prompt_logprobs": self.prompt_logprobs,
        }
        return tuple(name for name, is_used in used.items() if is_used)

    def _check_guide(self) -> None:
        for name, value in (("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)):
            if not -2 <= value <= 2:
                raise ValueError(f"{name} = {value}: must be in [-2, 2]; use 0 for no penalty")
        if not 0 < self.repetition_penalty <= 10:
            raise ValueError(
                f"repetition_penalty = {self.repetition_penalty}: must be in (0, 10]; use 1 for no penalty"
            )
        if not 0 <= self.num_top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"num_top_logprobs = {self.num_top_logprobs}: must be in [0, {MAX_TOP_LOGPROBS}]")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias: has {len(self.logit_bias)} tokens, and the limit is {MAX_LOGIT_BIAS}")
        for token, value in self.logit_bias:
            if not -100 <= value <= 100:
                raise ValueError(f"logit_bias of token {token} = {value}: must be in [-100, 100]")
        if self.grammar is not None and self.ignore_end:
            raise ValueError("grammar: needs the end token, which ignore_end = true excludes; use one of the two")
        if self.grammar is not None and self.min_new_tokens:
            raise ValueError("grammar: decides when the response ends; remove min_new_tokens")


def wrong_stop(stops: Sequence[str]) -> str | None:
    """What is wrong with stop strings, as the rest of a message that begins with the field's name."""
    if len(stops) > MAX_STOP_STRINGS:
        return (
            f": contains {len(stops)} texts, and the limit is {MAX_STOP_STRINGS}; "
            "use fewer, or stop at tokens with stop_token_ids"
        )
    for place, stop in enumerate(stops):
        if len(stop) > MAX_STOP_CHARACTERS:
            return (
                f"[{place}] = {stop[:_NUM_CHARACTERS_SHOWN]!r}...: has {len(stop)} characters, "
                f"and the limit is {MAX_STOP_CHARACTERS}; shorten it"
            )
        if any("\ud800" <= character <= "\udfff" for character in stop):
            return f"[{place}] = {stop[:_NUM_CHARACTERS_SHOWN]!r}: contains half of a surrogate pair; remove it"
    return None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for one response to a sequence of tokens.

    The randomness of sampling depends only on ``rng_key``, not on other requests in the batch.
    """

    request_id: str
    input_tokens: tuple[int, ...]
    sampling: SamplingParams
    rng_key: int
    given_tokens: tuple[int, ...] = ()
    """The beginning of the response, if it was generated earlier. Generation continues after it as if it had not been
    interrupted. These tokens count towards every limit of ``sampling``; the response holds only the new tokens."""
    session: str = ""
    """Requests with the same session share a prefix, such as the turns of an episode. A router sends them to the same
    server, which has the prefix in its cache, and never to one with older weights. Empty if there is no session."""
    media: Media = ()
    """Images and videos, and the tokens among ``input_tokens`` that stand for them."""

    def __post_init__(self) -> None:
        if not self.input_tokens:
            raise ValueError(f"request {self.request_id!r} has an empty prompt")
        if self.media and max(each.end for each in self.media) > len(self.input_tokens):
            raise ValueError(
                f"request {self.request_id!r}: media stand after the end of its {len(self.input_tokens)} tokens"
            )


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probs of the prompt's tokens under the model's own distribution, at temperature 1.

    There is one entry per token except for the first token, which nothing precedes.
    """

    logprobs: tuple[float, ...]
    top_logprobs: tuple[Alternatives, ...] = ()
    """Empty unless alternatives were requested."""


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """The response to a request: every token with its log-prob and the policy version that produced it."""

    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    output_versions: tuple[int, ...]
    stop_reason: StopReason
    queue_s: float = 0.0
    generate_s: float = 0.0
    output_top_logprobs: tuple[Alternatives, ...] = ()
    """Per output token, its alternatives; empty unless requested."""
    prompt_scores: PromptScores | None = None

    def __post_init__(self) -> None:
        count = len(self.output_tokens)
        if len(self.output_logprobs) != count or len(self.output_versions) != count:
            raise ValueError(
                f"response has {count} tokens, {len(self.output_logprobs)} logprobs and "
                f"{len(self.output_versions)} versions; the three must be equally long"
            )

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of a response. The last delta of a response has a ``stop_reason``."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop_reason: StopReason | None = None
    top_logprobs: tuple[Alternatives, ...] = ()
    """Per token, its alternatives; empty unless requested."""
    prompt_scores: PromptScores | None = None
    """In the first delta, if requested."""

    @classmethod
    def of(cls, response: ModelResponse) -> Delta:
        """A complete response as one delta."""
        return cls(
            response.output_tokens,
            response.output_logprobs,
            response.output_versions,
            response.stop_reason,
            response.output_top_logprobs,
            response.prompt_scores,
        )


MAX_REWARD = 1e15
"""The largest absolute reward. Squares and sums of larger ones would overflow in float32."""

REWARD_RULE = f"must be a finite number within ±{MAX_REWARD:g}, so that its square and sums do not overflow"


def is_reward(value: Any) -> bool:
    """Whether a number can be used as a reward: NaN, infinity and numbers that would overflow cannot."""
    return bool(abs(value) <= MAX_REWARD)


def reward_number(value: Any, name: str) -> float:
    """``value`` as a float. Text is refused, even if it looks like a number: it would hide a mistake."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} = {value[:_NUM_CHARACTERS_SHOWN]!r} is text: {REWARD_RULE}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} is a {type(value).__name__}: {REWARD_RULE} ({error})") from error
    if not is_reward(number):
        raise ValueError(f"{name} = {number}: {REWARD_RULE}")
    return number


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and additional values that the scorer returned with it."""

    value: float
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", reward_number(self.value, "reward"))


@dataclass(frozen=True, slots=True)
class Answer:
    """A single reply to a prompt, for scoring text that did not come from an ``Episode``."""

    prompt: Prompt
    text: str

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return (*self.prompt.messages, {"role": "assistant", "content": self.text})


@dataclass(frozen=True, slots=True, eq=False)
class TokenArrays:
    """The columns of a ``Trajectory`` as arrays of one value per token. They must not be changed."""

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float64]
    versions: NDArray[np.int64]

    @classmethod
    def of(cls, trajectory: Trajectory) -> TokenArrays:
        import numpy as np  # here, so that commands that read only the config start without it

        # Half the time of ``np.array``, which first looks at every value to find its type.
        return cls(
            np.fromiter(trajectory.tokens, np.int64, len(trajectory.tokens)),
            np.fromiter(trajectory.loss_mask, np.bool_, len(trajectory.loss_mask)),
            np.fromiter(trajectory.logprobs, np.float64, len(trajectory.logprobs)),
            np.fromiter(trajectory.versions, np.int64, len(trajectory.versions)),
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The tokens of one finished episode, or of one piece of it.

    ``loss_mask`` is 1 on tokens that the policy sampled and should learn from. On tokens that it did not sample,
    ``versions`` is -1 and ``logprobs`` is 0.0.
    """

    uid: str
    """The uid of the prompt. Trajectories with the same uid form a group."""
    sample: int
    """Number of the episode within the group. Pieces of one episode share it; groups are compared over episodes."""
    tokens: tuple[int, ...]
    prompt_length: int
    """Number of leading tokens that are the prompt."""
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    stop_reason: StopReason
    turn_rewards: tuple[float, ...] = ()
    """The reward of each turn of the model, where a turn is a run of sampled tokens. They sum to ``reward``.

    If empty, the whole reward belongs to the last turn.
    """
    info: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation, including the model's messages; empty if the workflow did not use an ``Episode``."""
    reward_info: Mapping[str, Any] = field(default_factory=dict)
    """What the scorer returned beside the reward. Numbers become metrics, and all values columns of rollout files."""
    media: Media = ()
    """Images and videos of the whole conversation, and the tokens that stand for them."""
    _arrays: TokenArrays | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.loss_mask) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"trajectory {self.uid}#{self.sample}: tokens, loss_mask, logprobs and versions have lengths "
                f"{len(self.tokens)}, {len(self.loss_mask)}, {len(self.logprobs)}, {len(self.versions)}; must be equal"
            )
        if not 0 < self.prompt_length <= len(self.tokens):
            raise ValueError(
                f"trajectory {self.uid}#{self.sample}: prompt_length = {self.prompt_length}, "
                f"must be in 1..{len(self.tokens)}"
            )
        if any(self.loss_mask[: self.prompt_length]):
            raise ValueError(f"trajectory {self.uid}#{self.sample}: loss_mask is set inside the prompt")
        if self.loss_mask.count(0) + self.loss_mask.count(1) != len(self.loss_mask):
            raise ValueError(f"trajectory {self.uid}#{self.sample}: loss_mask holds values other than 0 and 1")
        if min(compress(self.versions, self.loss_mask), default=0) < 0:
            raise ValueError(f"trajectory {self.uid}#{self.sample}: a trained token has no policy version")
        name = f"trajectory {self.uid}#{self.sample}: reward"
        object.__setattr__(self, "reward", reward_number(self.reward, name))
        object.__setattr__(self, "turn_rewards", tuple(reward_number(each, name) for each in self.turn_rewards))
        if self.turn_rewards and len(self.turn_rewards) != len(self.turn_ends):
            raise ValueError(
                f"trajectory {self.uid}#{self.sample}: {len(self.turn_rewards)} turn_rewards for "
                f"{len(self.turn_ends)} turns; a turn is a run of tokens that have a policy version"
            )
        if self.turn_rewards and not math.isclose(sum(self.turn_rewards), self.reward, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(
                f"trajectory {self.uid}#{self.sample}: turn_rewards sum to {sum(self.turn_rewards)}, "
                f"must sum to reward = {self.reward}"
            )

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The last trained token of each turn, or its last token if none is trained."""
        import numpy as np

        is_sampled = self.arrays.versions != NOT_SAMPLED
        edges = np.flatnonzero(np.diff(is_sampled, prepend=False, append=False))
        turns = edges.reshape(-1, 2).tolist()
        return tuple(self.last_trained(start, stop, default=stop - 1) for start, stop in turns)

    def last_trained(self, start: int, stop: int, *, default: int) -> int:
        """The last trained token of those from ``start`` up to ``stop``, which is not included."""
        found = self.arrays.loss_mask[start:stop].nonzero()[0]
        return start + int(found[-1]) if len(found) else default

    @property
    def arrays(self) -> TokenArrays:
        """The token columns as arrays. They are made once; everything that reads all tokens of a batch uses them."""
        if self._arrays is None:
            object.__setattr__(self, "_arrays", TokenArrays.of(self))
        assert self._arrays is not None
        return self._arrays

    def with_loss_mask(self, mask: NDArray[np.bool_]) -> Trajectory:
        """The same tokens, of which others are trained on."""
        masked = replace(self, loss_mask=tuple(mask.astype(int).tolist()))
        object.__setattr__(masked, "_arrays", replace(self.arrays, loss_mask=mask))
        return masked

    @property
    def response_tokens(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_length :]
