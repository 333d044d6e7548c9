"""The names that weights have in their Hugging Face model, whatever training has wrapped around it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_CHECKPOINTED = "_checkpoint_wrapped_module."


def plain_name(name: str) -> str:
    """A parameter's name in the model that a checkpointed one was made from."""
    return name.replace(_CHECKPOINTED, "")


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield plain_name(name), parameter
