"""How an episode runs, from prompt to scored trajectory; one file each (see ``core.protocols.RolloutWorkflow``).

A workflow class is made with ``(context, **rollout.workflow_args)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.protocols import RewardManager, Tokenizer
from headwater.core.records import SamplingParams
from headwater.core.registry import Registry

WORKFLOWS = Registry("workflow", "headwater.workflows")


@dataclass(frozen=True)
class WorkflowContext:
    """What every workflow is given to work with."""

    tokenizer: Tokenizer
    reward: RewardManager
    sampling: SamplingParams
