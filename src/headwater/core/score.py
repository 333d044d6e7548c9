"""The reward of an episode: which numbers are allowed, and who computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headwater.core.prompt import Prompt

MAX_REWARD = 1e15
"""The largest absolute reward. Squares and sums of larger ones would overflow in float32."""

REWARD_RULE = f"must be a finite number within ±{MAX_REWARD:g}, so that its square and sums do not overflow"

_NUM_CHARACTERS_SHOWN = 40


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


class ScorableEpisode(Protocol):
    """What a reward manager sees of an episode. ``Episode`` and ``Answer`` both have it."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def text(self) -> str:
        """The model's last reply."""
        ...

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The whole conversation: the prompt's messages, the model's replies and the messages between them."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A single reply to a prompt, for scoring text that did not come from an ``Episode``."""

    prompt: Prompt
    text: str

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return (*self.prompt.messages, {"role": "assistant", "content": self.text})


class RewardManager(Protocol):
    """Scores an episode. Raises ``RewardFailed`` if it cannot; a failure is never turned into a number."""

    async def score(self, episode: ScorableEpisode) -> Score: ...
