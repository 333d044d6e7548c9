"""The names that an agent loop for verl imports. Import them from here, or leave verl's imports as they are.

from headwater.workflows.adapters.verl import AgentLoopBase, AgentLoopOutput, register

@register("guesser")
class Guesser(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(
            request_id="1", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        mask = [1] * len(output.token_ids)
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=output.token_ids, response_mask=mask)
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from headwater.chat.parsers import ToolCallParser, make_parser
from headwater.chat.render import encode_rendered, render_chat
from headwater.core.errors import RolloutFailed
from headwater.core.protocols import Tokenizer
from headwater.core.tool_calls import ToolCall

T = TypeVar("T")


class TokenOutput(list[int]):
    """A response: a list of its tokens, as in the first versions of verl, with the attributes of later ones."""

    def __init__(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float] | None = None,
        stop_reason: str | None = None,
        extra_fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(token_ids)
        self.token_ids = list(token_ids)
        self.log_probs = None if log_probs is None else list(log_probs)
        self.stop_reason = stop_reason
        self.extra_fields = dict(extra_fields or {})
        self.routed_experts: Any = None
        self.num_preempted: int | None = None


@dataclass(kw_only=True)
class AgentLoopMetrics:
    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass(kw_only=True)
class AgentLoopOutput:
    """What ``run`` returns."""

    prompt_ids: list[int]
    response_ids: list[int]
    """Everything after the prompt: tokens of the model, and tokens of tools between them."""
    response_mask: list[int]
    """1 for tokens of the model, 0 for others."""
    response_logprobs: list[float] | None = None
    """Compared with the engine's; may be omitted."""
    reward_score: float | None = None
    """None means that the run's reward scores the response."""
    num_turns: int = 0
    metrics: AgentLoopMetrics | Mapping[str, Any] = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Stored with the rollout."""
    multi_modal_data: Mapping[str, Any] | None = None
    routed_experts: Any = None
    mm_processor_kwargs: Mapping[str, Any] | None = None


class LLMServerClient(ABC):
    """The model, as an agent loop sees it (``self.server_manager``)."""

    @abstractmethod
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput: ...


AsyncLLMServerManager = LLMServerClient
"""Its name in older versions."""


class AgentLoopBase(ABC):
    """Base of agent loops. There is one object for each episode."""

    _class_initialized = False

    def __init__(
        self,
        trainer_config: Any,
        server_manager: LLMServerClient,
        tokenizer: Tokenizer,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.init_class(config=trainer_config.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.data_config = self.config.data if data_config is None else data_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.apply_chat_template_kwargs: Mapping[str, Any] = self.data_config.get("apply_chat_template_kwargs", {})
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Tokenizer, processor: Any, **kwargs: Any) -> None:
        """Override this for work that is done once for all objects."""
        cls._class_initialized = True

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput: ...

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """The tokens of a chat that ends where the model's next message begins.

        ``images`` and ``videos`` are those of its parts, in order; parts may also hold them. With
        ``remove_system_prompt``, without what the template writes before the first message.
        """
        if audios:
            raise RolloutFailed("apply_chat_template was given audio; a model is shown only images and videos")
        arguments: dict[str, Any] = {"tools": list(tools)} if tools else {}
        if self.processor is not None:  # in a thread, because other episodes would wait while pictures are encoded
            pictures = self.processor.pictures
            messages = await asyncio.to_thread(pictures.held, messages)
            images, videos = await pictures.read_in_thread(images), await pictures.read_in_thread(None, videos)
        tokens = self._render(messages, images=images, videos=videos, **arguments)
        return tokens[len(self.system_prompt) :] if remove_system_prompt else tokens

    @cached_property
    def system_prompt(self) -> list[int]:
        """What the template writes before the first message, such as a default system message."""
        message = {"role": "user", "content": ""}
        one = self._render([message], add_generation_prompt=False)
        two = self._render([message, message], add_generation_prompt=False)
        return one[: max(0, 2 * len(one) - len(two))]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        images: Any = None,
        videos: Any = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[int]:
        arguments = {**self.apply_chat_template_kwargs, **arguments}
        if self.processor is None:
            if images or videos:
                raise RolloutFailed("apply_chat_template was given images or videos, and the model takes only text")
            text = render_chat(self.tokenizer, messages, arguments, add_generation_prompt=add_generation_prompt)
            return list(encode_rendered(self.tokenizer, text))
        pictures = self.processor.pictures
        chat, held = pictures.taken(messages)
        contents = pictures.read(images, videos) or held
        return pictures.encode(chat, contents, arguments, add_generation_prompt=add_generation_prompt)  # type: ignore[no-any-return]

    async def process_multi_modal_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The images and videos inside the parts of messages, under ``images`` and ``videos``."""
        if self.processor is None:
            return {}
        pictures = self.processor.pictures
        _, contents = await asyncio.to_thread(pictures.taken, messages)
        return {f"{kind}s": values for kind, values in (await pictures.by_kind(contents)).items()}

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return await self.process_multi_modal_info(messages)


def register(agent_name: str) -> Callable[[T], T]:
    """Mark an agent loop with a name. Headwater finds the class by its path in ``rollout.workflow``."""

    def decorator(subclass: T) -> T:
        return subclass

    return decorator


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the seconds of this block to ``timing_raw[name]``."""
    began = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - began


def rollout_trace_op(function: T) -> T:
    """Unchanged: ``trainer.trace`` records a run."""
    return function


def get_event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


@dataclass(frozen=True)
class FunctionCall:
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True)
class ToolParser:
    """Finds tool calls in the tokens of a response, with one of Headwater's parsers."""

    parser: ToolCallParser
    tokenizer: Tokenizer

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Tokenizer) -> ToolParser:
        return cls(make_parser(name, tokenizer, "multi_turn.format"), tokenizer)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text without calls, and the calls. Calls that cannot be read are left out."""
        schemas = [each.model_dump() if hasattr(each, "model_dump") else each for each in tools or ()]
        parsed = self.parser.parse(self.tokenizer.decode(list(responses_ids), skip_special_tokens=False), schemas)
        calls = [each for each in parsed.calls if isinstance(each, ToolCall)]
        return parsed.content, [
            FunctionCall(each.name, json.dumps(dict(each.arguments), ensure_ascii=False)) for each in calls
        ]
