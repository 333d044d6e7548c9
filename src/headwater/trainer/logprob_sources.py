"""Which log-probs a step measures updates from, and what computes them."""

from __future__ import annotations

from headwater.config.algorithm_checks import advantage_of
from headwater.config.schema import Config
from headwater.core.registry import is_path

_OLD_LOGPROBS = {
    "rollout": "from the same log-probs",
    "recompute": "from the learner's, which a forward pass computes before the update",
    "loglinear": "from an interpolation between these and the learner's",
    "metrics": "from the learner's, which a forward pass computes before the update and compares with loglinear",
}
_FROM_THE_UPDATE = "from the learner's before the update, which the first optimiser step computes itself"


def needs_logprobs_first(config: Config, *, is_saved: bool) -> bool:
    """Whether the learner's log-probs of all trained tokens are computed before the update.

    With ``recompute``, the update needs them of the policy as it is before the first optimiser step, whose own passes
    compute them anyway. A separate pass is needed only by what reads them before the update, or reads those of all
    tokens. ``is_saved`` is whether the step writes a file of rollouts.
    """
    algorithm = config.algorithm
    if algorithm.old_logprobs != "recompute":
        return algorithm.old_logprobs == "metrics"
    return (
        bool(algorithm.corrections)
        or algorithm.kl_in_reward > 0
        or algorithm.kl_in_loss > 0  # kl/reference is the divergence before the update
        or _advantage_may_read_them(config)
        # The rows of the first optimiser step are trained again.
        or config.learner.num_epochs > 1
        # The pass takes no time: responses are scored meanwhile.
        or config.reward.join == "late"
        or (is_saved and config.trainer.save_learner_logprobs)
    )


def _advantage_may_read_them(config: Config) -> bool:
    declared = advantage_of(config)
    return is_path(config.algorithm.advantage) or declared is None or declared.traits.needs_recomputed_logprobs


def logprob_sources(config: Config) -> str:
    """Which log-probs a step uses and what computes them, in one line for the start of a run."""
    algorithm, backend = config.algorithm, config.rollout.backend
    wanted = {"kl_in_loss": algorithm.kl_in_loss, "kl_in_reward": algorithm.kl_in_reward}
    uses = " and ".join(f"algorithm.{name}" for name, coefficient in wanted.items() if coefficient > 0)
    reference = f"the reference model computes those of {uses}" if uses else "no reference model is used"
    old = _OLD_LOGPROBS[algorithm.old_logprobs]
    if algorithm.old_logprobs == "recompute" and not needs_logprobs_first(config, is_saved=True):
        later = "" if config.learner.num_minibatches == 1 else ", and a forward pass those of the later ones"
        old = f"{_FROM_THE_UPDATE}{later}"
    return (
        f"Log-probs: the engine ({backend}) records those of sampled tokens; updates are measured {old} "
        f"(algorithm.old_logprobs = {algorithm.old_logprobs}); {reference}"
    )
