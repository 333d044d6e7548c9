"""Generalised advantage estimation over turns: one action is a whole message of the model."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages
from headwater.algorithms.advantages.gae import gae_recursion
from headwater.algorithms.masked import keep, require, whiten
from headwater.config.constraints import Within
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(
    AdvantageTraits(needs_values=True, bootstraps=True, varies_by_token=True, discount="gamma", whitens="whitened")
)
def gae_turn(
    inputs: AdvantageInputs,
    *,
    gamma: Annotated[float, Within(0, 1)] = 1.0,
    lam: Annotated[float, Within(0, 1)] = 1.0,
    whitened: bool = True,
) -> Advantages:
    """GAE with one step per turn; every token of a turn shares its advantage and its return.

    The reward of a turn is the sum over its kept tokens. Its value is that of its first kept token: the expectation
    when the turn began. Discounts count turns, so long messages are not discounted more than short ones.
    """
    values = require(inputs.values, "values", "algorithm.advantage = gae_turn", "it needs a critic")
    turns = require(inputs.turns, "turns", "algorithm.advantage = gae_turn", "use a workflow that numbers its turns")
    in_turn = _membership(turns, inputs.mask)
    rewards = torch.einsum("stk,st->sk", in_turn, keep(inputs.rewards, inputs.mask))
    first = in_turn.cumsum(dim=1).eq(1) & in_turn.bool()
    turn_values = torch.einsum("stk,st->sk", first.to(values.dtype), values)
    played = in_turn.any(dim=1).to(values.dtype)
    advantages = gae_recursion(rewards, turn_values, played, gamma, lam, inputs.final_values)
    per_token = torch.einsum("stk,sk->st", in_turn, keep(advantages, played))
    returns = per_token + torch.einsum("stk,sk->st", in_turn, turn_values)
    return Advantages(whiten(per_token, inputs.mask) if whitened else per_token, returns)


def _membership(turns: Tensor, mask: Tensor) -> Tensor:
    """``[samples, tokens, turns]``: 1 where a kept token belongs to a turn."""
    kept = mask != 0
    if bool((kept & (turns < 0)).any()):
        raise ValueError("a trained token belongs to no turn")
    num_turns = int(turns.masked_fill(~kept, 0).max()) + 1
    numbers = torch.arange(num_turns, device=turns.device)
    return ((turns[..., None] == numbers) & kept[..., None]).to(mask.dtype)
