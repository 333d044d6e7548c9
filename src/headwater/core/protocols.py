"""The contracts between folders. Anything that has these methods fits, wherever it is defined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headwater.core.records import ModelRequest, ModelResponse, Prompt, Score, Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from headwater.core.data_proto import DataProto


class Tokenizer(Protocol):
    """What the framework asks of a tokenizer; transformers' tokenizers have all of it."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def decode(self, token_ids: Any, **kwargs: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Policy version ``version`` as named tensors, in the names of the Hugging Face model."""

    version: int
    tensors: Iterable[tuple[str, torch.Tensor]]


MemoryTag = Literal["kv_cache", "weights"]
"""What an engine can give back to the device while it sleeps."""

ALL_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights")


class EpisodeEngine(Protocol):
    """What an episode sees of the engine: it may ask for responses, as often as it likes."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse: ...


class InferenceEngine(EpisodeEngine, Protocol):
    """Generates responses, tags every token with the policy version that made it, and takes new weights.

    ``pause`` stops the making of tokens and keeps every request; ``sleep`` also gives memory back until ``wake``.
    """

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def update_weights(self, update: WeightUpdate) -> Future[None]: ...
    def get_version(self) -> int: ...
    def set_version(self, version: int) -> None: ...
    def weights_checksum(self) -> str:
        """Of the weights that serve now, as ``models.checksum`` counts it."""
        ...

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None: ...
    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None: ...
    def close(self) -> None: ...


class RolloutWorkflow(Protocol):
    """One episode. ``None`` means rejected: the episode is counted and not trained on."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeInput) -> Trajectory | list[Trajectory] | None: ...


@dataclass(frozen=True, slots=True)
class EpisodeInput:
    """What a workflow is given: the prompt, which sample of its group this is, and the key of its randomness."""

    prompt: Prompt
    sample: int
    rng_key: int


class RewardManager(Protocol):
    """Scores a finished response. Raises ``RewardFailed`` where it cannot; never invents a number."""

    async def score(self, prompt: Prompt, response_text: str) -> Score: ...


class TrainEngine(Protocol):
    """Holds the trained weights and their optimiser."""

    def compute(self, batch: DataProto) -> Mapping[str, torch.Tensor]:
        """What the model says of every trained token: log-probs of a policy, values of a critic."""
        ...

    def train_step(self, batch: DataProto, loss_fn: Callable[..., Any]) -> Mapping[str, float]: ...
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def offload(self) -> None: ...
    def onload(self) -> None: ...
