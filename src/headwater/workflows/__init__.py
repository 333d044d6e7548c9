"""How an episode runs, from prompt to scored trajectory; one file each (see ``core.protocols.RolloutWorkflow``).

A workflow class is made with ``(context, **rollout.workflow_args)``. docs/workflows.md says how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.core.errors import RolloutFailed
from headwater.core.protocols import RewardManager, Tokenizer
from headwater.core.records import Prompt, SamplingParams
from headwater.core.registry import Registry

WORKFLOWS = Registry("workflow", "headwater.workflows")


@dataclass(frozen=True)
class WorkflowContext:
    """What every workflow is given to work with."""

    tokenizer: Tokenizer
    reward: RewardManager
    sampling: SamplingParams
    """``max_new_tokens`` is the room for everything after the prompt, all turns and what stands between them."""
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    """data.chat_template_args: what prompts were rendered with, for messages that are added to them."""


def refuse_media(prompt: Prompt, workflow: str) -> None:
    """For a workflow that hands the model text alone: a picture left out would be a silent change of the task."""
    if prompt.multi_modal:
        raise RolloutFailed(
            f"row {prompt.uid}: has {', '.join(prompt.multi_modal)}, and workflow {workflow} is for text; "
            "leave those columns out, or set rollout.workflow to one that hands them to the model"
        )
