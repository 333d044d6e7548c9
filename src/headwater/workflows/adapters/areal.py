"""The names that a workflow for AReaL imports. Import them from here, or leave AReaL's imports as they are.

from headwater.workflows.adapters.areal import ModelRequest, RolloutWorkflow

class Answer(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig, tokenizer):
        ...

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=..., gconfig=self.gconfig))
        return {"input_ids": ..., "loss_mask": ..., "rewards": ...}
"""

from __future__ import annotations

import base64
import importlib
import io
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch

from headwater.core.protocols import Tokenizer
from headwater.models.load import load_tokenizer
from headwater.workflows.adapters.areal_reward import AsyncRewardWrapper
from headwater.workflows.adapters.journal import current_journal

T = TypeVar("T")

ALL_TOKENS = int(1e8)
"""``top_k`` that keeps all tokens."""


@dataclass
class GenerationHyperparameters:
    """How a response is sampled. ``gconfig`` of a constructor has the values of the recipe."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int = 65536
    """The longest prompt and response together."""
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = ALL_TOKENS
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] | None = None
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    max_workers: int | None = None

    def new(self, **changes: Any) -> GenerationHyperparameters:
        return replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Tokenizer) -> GenerationHyperparameters:
        """A copy that also stops at the tokenizer's end and padding tokens."""
        ends = [each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None]
        return replace(self, stop_token_ids=list(dict.fromkeys([*self.stop_token_ids, *ends])))


@dataclass
class ModelRequest:
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    image_data: Sequence[Any] | None = None
    """All images of the sequence, in order: base64 text, Pillow images, bytes or paths."""
    processor: Any = None
    vision_msg_vllm: Any = None
    """Not used: images are sent with ``image_data``."""

    def copy(self) -> ModelRequest:
        return replace(self, input_ids=list(self.input_ids), metadata=dict(self.metadata))


@dataclass
class ModelResponse:
    """A response with lists, which workflows join."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: Literal["length", "stop", "tool_calls", "abort"] = "stop"
    tokenizer: Any = None
    latency: float = 0.0
    ttft: float = 0.0
    routed_experts: Any = None

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


class InferenceEngine(ABC):
    """The model, as ``arun_episode`` sees it."""

    @abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse: ...

    @abstractmethod
    def get_version(self) -> int: ...


class RolloutWorkflow(ABC):
    """Base of workflows. One object runs all episodes."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Tensors of one or more sequences, or None to reject the episode."""


def concat_padded_tensors(items: Sequence[Mapping[str, torch.Tensor]], pad_value: float = 0.0) -> dict[str, Any]:
    """Join sequences of different lengths to one batch. ``attention_mask`` is 0 where a sequence was padded."""
    if not items:
        return {}
    width = max(value.shape[1] for item in items for value in item.values() if value.ndim > 1)

    def padded(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.ndim < 2 or value.shape[1] == width:
            return value
        fill = 0.0 if name == "attention_mask" else pad_value
        rest = value.new_full((value.shape[0], width - value.shape[1], *value.shape[2:]), fill)
        return torch.cat([value, rest], dim=1)

    return {name: torch.cat([padded(name, item[name]) for item in items]) for name in items[0]}


def apply_chat_template(tokenizer: Any, conversation: Any, **kwargs: Any) -> Any:
    if kwargs.get("tokenize", True):
        kwargs.setdefault("return_dict", False)
    return tokenizer.apply_chat_template(conversation, **kwargs)


def load_hf_tokenizer(path: str) -> Any:
    return load_tokenizer(path)


def image2base64(images: Any) -> list[str]:
    """Images as base64 text, for ``image_data`` of a request."""
    many = images if isinstance(images, (list, tuple)) else [images]
    texts = []
    for image in many:
        stream = io.BytesIO()
        image.save(stream, "png")
        texts.append(base64.b64encode(stream.getvalue()).decode())
    return texts


def import_from_string(path: str) -> Any:
    """The object that ``package.module.name`` names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


__all__ = [
    "AsyncRewardWrapper",
    "GenerationHyperparameters",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "RolloutWorkflow",
    "apply_chat_template",
    "atrace_session_phase",
    "concat_padded_tensors",
    "image2base64",
    "import_from_string",
    "load_hf_tokenizer",
    "logging",
    "session_context",
    "stats_tracker",
    "trace_session",
    "workflow_context",
]


class _Stats:
    """Values that a workflow reports become part of the ``info`` of its rollout."""

    def scalar(self, **values: Any) -> None:
        journal = current_journal()
        if journal is not None:
            journal.notes.update(values)


class stats_tracker:
    """A module in AReaL."""

    @staticmethod
    def get(scope: str = "") -> _Stats:
        return _Stats()


class workflow_context:
    """A module in AReaL."""

    @staticmethod
    def stat_scope() -> str:
        return "rollout"


@asynccontextmanager
async def atrace_session_phase(*args: Any, **kwargs: Any) -> AsyncIterator[None]:
    """Without effect: ``trainer.trace`` records a run."""
    yield


def trace_session(*args: Any, **kwargs: Any) -> Callable[[T], T]:
    """Without effect: ``trainer.trace`` records a run."""
    return lambda function: function


session_context = trace_session
