"""Traits: what must be known about an extension before it is imported, stated where it is registered.

    @ADVANTAGES.register(AdvantageTraits(needs_values=True, whitens="whitened"))
    def my_advantage(inputs: AdvantageInputs, *, gamma: Annotated[float, Within(0, 1)] = 1.0, ...): ...

``declared.py`` reads traits and argument ranges from the source text, without importing the file, so both must be
written as literals. What is registered without traits has the defaults below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.core.registry import Traits

Switch = bool | str
"""True, False, or the name of a boolean argument of the algorithm that decides."""


@dataclass(frozen=True, kw_only=True)
class AdvantageTraits(Traits):
    key: ClassVar[str] = "algorithm.advantage"
    package: ClassVar[str] = "headwater.algorithms.advantages"
    kind: ClassVar[str] = "advantage"

    needs_values: bool = False
    """It reads a critic's values, and a critic learns the returns it computes."""
    bootstraps: bool = False
    """It continues unfinished responses with their final values (``critic.bootstrap_unfinished``)."""
    compares_groups: bool = False
    """It compares the responses to one prompt, so that a group needs at least two."""
    needs_greedy_baseline: bool = False
    """It reads the score of a greedy response to every prompt."""
    needs_recomputed_logprobs: bool = False
    """It reads what only a forward pass of the learner gives, such as sums of squared probabilities."""
    varies_by_token: bool = False
    """Tokens of one response can get different advantages even if only its last token has a reward."""
    discount: str = ""
    """The argument that is a discount per token; 1 means no discount."""
    reads_reward_parts: bool = False
    """It reads the parts of a reward instead of their sum."""
    scores_alone: str = ""
    """Why nothing may be added to the scorer's reward; ``{key}`` becomes the setting that would add something."""
    scores_as_given: str = ""
    """Why the scores must not be normalised first."""
    subtracts_group_mean: bool = False
    """A constant added to all scores of a group changes nothing."""
    divides_by_group_std: Switch = False
    """It divides by the deviation of the group, so that neither a constant nor a factor per group changes anything."""
    whitens: Switch = False
    """It normalises its advantages over the batch."""


@dataclass(frozen=True, kw_only=True)
class LossTraits(Traits):
    key: ClassVar[str] = "algorithm.policy_loss"
    package: ClassVar[str] = "headwater.algorithms.policy_losses"
    kind: ClassVar[str] = "policy loss"

    needs_all_samples: bool = False
    """Samples whose advantage is 0 have a gradient, or decide which tokens of the others count."""
    own_aggregation: str = ""
    """The only aggregation the loss is defined for, unless an argument ``aggregation`` is given."""
    has_no_ratio: bool = False
    """It does not multiply by the ratio to the old policy, so that a correction of the trained policy may weigh it."""
    two_policies: bool = False
    """It weighs tokens by the ratio between the proximal policy and the one that sampled, as corrections do."""


@dataclass(frozen=True, kw_only=True)
class CorrectionTraits(Traits):
    key: ClassVar[str] = "algorithm.corrections"
    package: ClassVar[str] = "headwater.algorithms.corrections"
    kind: ClassVar[str] = "correction"

    weighs_by_ratio: Switch = False
    """Its weights contain the ratio between the two policies; two such corrections would square it."""


@dataclass(frozen=True, kw_only=True)
class WorkflowTraits(Traits):
    key: ClassVar[str] = "rollout.workflow"
    package: ClassVar[str] = "headwater.workflows"
    kind: ClassVar[str] = "workflow"

    uses_tools: bool = False
    """It calls the tools of ``tools.use`` and ``tools.config``."""


@dataclass(frozen=True, kw_only=True)
class BackendTraits(Traits):
    key: ClassVar[str] = "rollout.backend"
    package: ClassVar[str] = "headwater.backends"
    kind: ClassVar[str] = "backend"

    engine_settings: tuple[str, ...] = ()
    """The settings of the section ``engine`` that it reads; empty means all of them."""
    gpu_settings: tuple[str, ...] = ()
    """Those of them that have no effect on a CPU with this backend."""
    connects: bool = False
    """It talks to servers: running ones (``rollout.servers``) or its own (``rollout.launch``)."""
    needs_servers: bool = False
    """It cannot be used with ``rollout.placement=colocated``."""
    is_foreign: bool = False
    """Its servers are another program in a separate Python environment (``rollout.launch.python``)."""
    takes_adapters: bool = False
    """It takes LoRA adapters without the base weights (``rollout.publish=adapter``)."""
    is_planned: bool = False
    """The memory plan (``learner.residency``) knows its memory: it is Headwater's engine, in the learner's process."""
    transfers: tuple[str, ...] = ("shared_memory", "file", "collective", "cuda_ipc")
    """The values of ``rollout.weight_transfer`` that it supports, the preferred one first."""
    links: tuple[str, ...] = ("gloo", "nccl")
    """The values of ``rollout.weight_link`` that it supports."""


@dataclass(frozen=True, kw_only=True)
class ScorerTraits(Traits):
    key: ClassVar[str] = "reward.function"
    package: ClassVar[str] = "headwater.rewards.scorers"
    kind: ClassVar[str] = "scorer"

    data_sources: tuple[str, ...] = ()
    """The data sources whose rows it scores, besides its own name; ``*`` stands for any text."""
    is_quick: bool = False
    """It takes microseconds on any text, so it is called directly and not in a worker process."""
