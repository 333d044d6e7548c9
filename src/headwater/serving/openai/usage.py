"""Token counts of a request, and the other fields that every OpenAI reply begins with."""

from __future__ import annotations

from typing import Any

from headwater.serving.openai.plan import Plan


def head(plan: Plan, kind: str) -> dict[str, Any]:
    return {"id": plan.name, "object": kind, "created": plan.created, "model": plan.model}


def usage(plan: Plan, num_completion_tokens: int) -> dict[str, int]:
    """A prompt counts once however many samples it has."""
    num_prompt_tokens = plan.num_prompt_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def fingerprint(version: int) -> str:
    """The weights behind a reply, in the field where OpenAI names its back end."""
    return f"version-{version}"
