"""The tokens of a finished episode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

from headwater.core.media import Media
from headwater.core.response import StopReason
from headwater.core.score import reward_number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
