"""Inference engines behind one interface, one file each (see ``core.protocols.InferenceEngine``).

A backend class is made with ``from_context(BackendContext)``: it loads, starts or connects to whatever it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.config.schema import Config
from headwater.core.errors import ConfigError
from headwater.core.protocols import InferenceEngine, Tokenizer
from headwater.core.registry import Registry
from headwater.observe.spans import Spans

BACKENDS = Registry("backend", "headwater.backends")


@dataclass(frozen=True)
class BackendContext:
    """What every backend is given to start from."""

    config: Config
    model_path: str
    """A folder, hub id or built-in name; a checkpoint's model when a run is resumed."""
    tokenizer: Tokenizer
    spans: Spans


def make_engine(context: BackendContext) -> InferenceEngine:
    """The engine that ``rollout.placement`` and ``rollout.backend`` name."""
    rollout = context.config.rollout
    if rollout.placement == "disaggregated":
        from headwater.backends.served.engine import ServedEngine

        return ServedEngine.from_context(context)
    engine: InferenceEngine = BACKENDS.resolve(rollout.backend).from_context(context)
    return engine


def check_lengths(context: BackendContext, model: Any) -> None:
    """Prompts and responses as long as the recipe allows must fit the model."""
    check_length(context, model.config.get_text_config().max_position_embeddings)


def check_length(context: BackendContext, limit: int) -> None:
    """As ``check_lengths``, for a model that takes so many tokens."""
    config = context.config
    needed = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > limit:
        raise ConfigError(
            [
                f"data.max_prompt_tokens + rollout.max_new_tokens = {needed}: over the {limit} positions of "
                f"{context.model_path}; lower one of them"
            ]
        )
