"""One row of a dataset."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.core.media import Media


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row, rendered and tokenised."""

    uid: str
    """Stable identifier of the row, for example ``arithmetic/train/17``."""
    messages: tuple[Mapping[str, Any], ...]
    """The chat before rendering. ``content`` is a string, or a list of parts if the row has images or videos."""
    text: str
    """The output of the chat template."""
    tokens: tuple[int, ...]
    data_source: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_schemas: tuple[Mapping[str, Any], ...] = ()
    """The tools that the prompt offers to the model, as OpenAI function schemas."""
    media: Media = ()
    """Images and videos, and the tokens that stand for them."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row, for workflows and reward functions; and ``prompt``, if it is a plain string."""
    source: str = ""
    """The entry of ``data.train`` or ``data.eval`` that has the row, by its name in metrics."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"prompt {self.uid!r} has no tokens")
        try:
            # Integers of numpy become plain ones. Nothing after this looks at the types again.
            object.__setattr__(self, "tokens", tuple(map(operator.index, self.tokens)))
        except TypeError:
            raise ValueError(f"prompt {self.uid!r}: its tokens must be whole numbers") from None
