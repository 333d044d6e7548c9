"""Headwater's engine (``headwater.engine``) inside the training process."""

from __future__ import annotations

from typing import ClassVar

from headwater.backends import BACKENDS, BackendContext, check_lengths, engine_settings
from headwater.config.traits import BackendTraits
from headwater.core.capabilities import Capabilities
from headwater.engine.engine import FEATURES, Engine
from headwater.models.load import load_model, load_processor


@BACKENDS.register(BackendTraits(takes_adapters=True, is_planned=True))
class EmbeddedEngine(Engine):
    """The embedded engine as a backend: a separate model on the learner's device."""

    declared_capabilities: ClassVar[Capabilities] = Capabilities(
        rounds=True, joint_start=True, media=True, features=FEATURES
    )

    @classmethod
    def from_context(cls, context: BackendContext) -> EmbeddedEngine:
        config = context.config
        model = load_model(
            context.model_path, dtype=config.model.dtype, device=config.model.device, seed=config.run.seed
        )
        check_lengths(context, model)
        return cls(
            model,
            context.tokenizer,
            engine_settings(config),
            shares_device=True,
            spans=context.spans,
            processor=load_processor(context.model_path),
        )
