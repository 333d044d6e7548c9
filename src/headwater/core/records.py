"""The records of a run: prompts, scores, trajectories and why some were dropped."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, chain, compress
from typing import TYPE_CHECKING, Any, Protocol

from headwater.core.media import Media
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams, StopReason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Workflows, datasets and scripts outside the package find these records here.
__all__ = ["ModelRequest", "ModelResponse", "Prompt", "SamplingParams", "Score", "Trajectory"]


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
    UNREADABLE_ROW = "unreadable_row"
    """The row cannot be made a prompt, for example because its image is gone or damaged."""
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
        try:
            # Integers of numpy become plain ones. Nothing after this looks at the types again.
            object.__setattr__(self, "tokens", tuple(map(operator.index, self.tokens)))
        except TypeError:
            raise ValueError(f"prompt {self.uid!r}: its tokens must be whole numbers") from None


MAX_REWARD = 1e15
"""The largest absolute reward. Squares and sums of larger ones would overflow in float32."""

REWARD_RULE = f"must be a finite number within ±{MAX_REWARD:g}, so that its square and sums do not overflow"

_NUM_CHARACTERS_SHOWN = 40


def is_reward(value: Any) -> bool:
    """Whether a number can be used as a reward: NaN, infinity and numbers that would overflow cannot."""
    return bool(abs(value) <= MAX_REWARD)


def _is_plain_reward(value: Any) -> bool:
    """Whether ``reward_number`` would return the same object."""
    return type(value) is float and -MAX_REWARD <= value <= MAX_REWARD


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
        if not _is_plain_reward(self.value):
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


NOT_SAMPLED = -1
"""Policy version of tokens that the policy did not produce: prompt, template and tool tokens."""


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
        if not _is_plain_reward(self.reward):
            object.__setattr__(self, "reward", reward_number(self.reward, self._reward_name))
        if type(self.turn_rewards) is not tuple or self.turn_rewards:
            self._check_turn_rewards()

    @property
    def _reward_name(self) -> str:
        return f"trajectory {self.uid}#{self.sample}: reward"

    def _check_turn_rewards(self) -> None:
        turn_rewards = tuple(reward_number(each, self._reward_name) for each in self.turn_rewards)
        object.__setattr__(self, "turn_rewards", turn_rewards)
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


def make_arrays(trajectories: Sequence[Trajectory]) -> None:
    """Make the ``arrays`` of all trajectories that have none. Many short ones take a fraction of the time together."""
    import numpy as np

    new = [each for each in trajectories if each._arrays is None]
    ends = list(accumulate(len(each.tokens) for each in new))
    if not new:
        return

    def joined(columns: Iterable[Iterable[Any]], dtype: type[np.generic]) -> NDArray[Any]:
        return np.fromiter(chain.from_iterable(columns), dtype, ends[-1])

    tokens = joined((each.tokens for each in new), np.int64)
    loss_mask = joined((each.loss_mask for each in new), np.bool_)
    logprobs = joined((each.logprobs for each in new), np.float64)
    versions = joined((each.versions for each in new), np.int64)
    for each, start, end in zip(new, (0, *ends), ends, strict=False):
        part = slice(start, end)
        made = TokenArrays(tokens[part], loss_mask[part], logprobs[part], versions[part])
        object.__setattr__(each, "_arrays", made)
