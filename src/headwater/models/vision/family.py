"""What differs between families of vision models, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headwater.core.media import MediaContent, MediaKind

if TYPE_CHECKING:
    from torch import Tensor


class BlockShape(NamedTuple):
    """A ``MediaBlock`` without its place."""

    length: int
    grid: tuple[int, int, int] = (0, 0, 0)
    time_step: float = 1.0


class MediaFeatures(NamedTuple):
    """What the vision tower makes of one image or video, in the order of its tokens."""

    embeddings: Tensor
    """``[tokens, hidden]``. They replace the embeddings of the tokens."""
    deep: tuple[Tensor, ...] = ()
    """Qwen3-VL: what is added to the hidden states of these tokens after the first layer, the second, ...;
    ``[tokens, hidden]`` each. Empty for other models."""


class VisionFamily(Protocol):
    """One family of models: how media become pixels and tokens, and how its tower is called. It can be pickled."""

    image_processor: Any
    """The image processor of transformers."""
    uses_token_types: bool
    """Whether the forward pass of transformers takes the kind of every token, to compute rotary positions."""

    def placeholder(self, kind: MediaKind) -> str:
        """The token that the chat template writes for one image or video; empty if the model takes none."""
        ...

    def prepared(self, text: str) -> str:
        """A rendered chat without what the chat template writes around a placeholder that is to be replaced with it."""
        ...

    def token(self, kind: MediaKind) -> str:
        """The token that stands for a piece of an image or video."""
        ...

    def pieces(self, content: MediaContent) -> Sequence[str | BlockShape]:
        """What replaces the placeholder: texts, and tokens that stand for the content."""
        ...

    def inputs(self, content: MediaContent) -> dict[str, Tensor]:
        """The tensors that the model's forward pass takes for the content."""
        ...

    def joined(self, inputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of all media of one sequence, as the model's forward pass takes them."""
        ...

    def features(self, model: Any, inputs: Sequence[Mapping[str, Tensor]]) -> list[MediaFeatures]:
        """One call of the vision tower for several contents. The inputs are on the CPU."""
        ...
