"""What an engine is asked for, how it samples, and what it answers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headwater.core.media import Media

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
"""Searching for the stop strings of one request delays all others, so a request may not have too many of them."""

_NUM_CHARACTERS_SHOWN = 40

SamplingFeature = Literal["logit_bias", "penalties", "grammar", "top_logprobs", "prompt_logprobs"]
"""Settings of a request beyond temperature, truncation and stops. ``Capabilities`` says which an engine has."""

MAX_TOP_LOGPROBS = 20
"""The largest number of alternatives per token, as in OpenAI's API."""
MAX_LOGIT_BIAS = 4096
"""The largest number of tokens that one request may bias."""

GrammarKind = Literal["json_schema", "regex", "lark"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "lark")


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


def derive_key(*parts: int | str) -> int:
    """Derive a signed 64-bit key, for example ``derive_key(seed, "rollout", uid, sample)``."""
    # Lengths are part of the text, so that ("ab", "c") and ("a", "bc") differ.
    text = "".join([f"{len(part)}:{part}" for part in map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


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


StopReason = Literal["stop", "length", "tool_calls", "abort"]

Alternatives = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their log-probs, the most likely first."""


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
