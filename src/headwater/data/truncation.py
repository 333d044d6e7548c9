"""Cutting a prompt that is too long."""

from __future__ import annotations

from typing import Literal

Cut = Literal["left", "right", "middle"]


def cut_tokens(tokens: tuple[int, ...], limit: int, cut: Cut) -> tuple[int, ...]:
    """At most ``limit`` tokens; ``cut`` names the end, or the middle, that is lost."""
    if len(tokens) <= limit:
        return tokens
    if cut == "left":
        return tokens[-limit:]
    if cut == "right":
        return tokens[:limit]
    num_head = limit // 2
    return tokens[:num_head] + tokens[len(tokens) - (limit - num_head) :]
