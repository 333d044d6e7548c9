"""Parts of a model that are not trained (``learner.freeze``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from headwater.core.errors import ConfigError


def freeze_parts(model: Any, parts: Sequence[str]) -> None:
    """Freeze the parameters of ``parts`` in place. A part that the model does not have is refused."""
    if "vision" not in parts:
        return
    towers = vision_modules(model)
    if not towers:
        raise ConfigError(
            [
                f"learner.freeze = [vision]: this {model.config.model_type} model reads only text and has no vision "
                "tower; remove it from the list"
            ]
        )
    for tower in towers:
        tower.requires_grad_(False)


def vision_modules(model: Any) -> list[nn.Module]:
    """The modules that turn pixels into embeddings: the vision tower and its projector. Empty for a text model."""
    from headwater.models.vision import vision_parameter_names  # only these models need it

    # model.visual.blocks.0... belongs to model.visual.
    names = dict.fromkeys(".".join(name.split(".")[:2]) for name in sorted(vision_parameter_names(model)))
    return [model.get_submodule(name) for name in names]
