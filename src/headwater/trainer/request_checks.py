"""Checks of the data and settings against an engine, before the first request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headwater.config.schema import Config
from headwater.core.capabilities import Capabilities
from headwater.core.errors import ConfigError
from headwater.core.protocols import EngineLimits, InferenceEngine
from headwater.core.records import Prompt
from headwater.core.registry import is_path
from headwater.data.load import MeasuredDataset, PromptDataset, readable_prompts

_NUM_FIRST_ROWS = 100
"""How many rows are searched before a run: for images and videos if the engine cannot take them, and for a row that can
be read."""


@dataclass(frozen=True)
class Needs:
    """What the prompts of a dataset need of an engine.

    It is kept for servers that join a run later: while the run draws prompts, no other thread may read its dataset.
    """

    key: str
    """``data.train`` or ``data.eval``."""
    longest_prompt: int
    """In tokens."""
    media: tuple[Prompt, ...]
    """The first row with an image and the first one with a video, if there are any."""

    @classmethod
    def of(cls, config: Config, can: Capabilities, dataset: PromptDataset, key: str) -> Needs:
        """``can`` is what an engine can do that was checked already: without media, the rows have none."""
        media: dict[str, Prompt] = {}
        if can.media and not is_path(config.rollout.workflow):
            for prompt in first_prompts(config, dataset, key):
                for item in prompt.media:
                    media.setdefault(item.content.kind, prompt)
        return cls(key, _longest_prompt(config, dataset), tuple(media.values()))

    def check(self, config: Config, engine: InferenceEngine) -> None:
        """Refuse an engine that could not answer the prompts."""
        _check(config, engine, self.media, self.longest_prompt, self.key)


def check_answers(config: Config, engine: InferenceEngine, dataset: PromptDataset, key: str) -> None:
    """Refuse prompts that an engine could not answer."""
    # Not only the first row: datasets may be mixed.
    _check(config, engine, first_prompts(config, dataset, key), _longest_prompt(config, dataset), key)


def _check(config: Config, engine: InferenceEngine, prompts: Iterable[Prompt], longest_prompt: int, key: str) -> None:
    can = engine.capabilities
    # A workflow of the user may use images and videos that nothing shows to the model.
    if not (can.media and can.videos) and not is_path(config.rollout.workflow):
        for prompt in prompts:
            _check_media_of(config, can, prompt, key)
    key_of_limit, num_new = "rollout.max_new_tokens", config.rollout.max_new_tokens
    if key == "data.eval" and config.eval.max_new_tokens:
        key_of_limit, num_new = "eval.max_new_tokens", config.eval.max_new_tokens
    check_requests_fit(num_new, engine.limits, longest_prompt, key, key_of_limit)


def _longest_prompt(config: Config, dataset: PromptDataset) -> int:
    return dataset.longest_prompt if isinstance(dataset, MeasuredDataset) else config.data.max_prompt_tokens


def first_prompts(config: Config, dataset: PromptDataset, key: str) -> Iterator[Prompt]:
    """The first rows, without those that a run would drop because they cannot be read."""
    is_dropped = key == "data.train" and config.rollout.on_failure == "drop"
    return readable_prompts(dataset, range(min(len(dataset), _NUM_FIRST_ROWS)), skips_unreadable=is_dropped)


def _check_media_of(config: Config, can: Capabilities, prompt: Prompt, key: str) -> None:
    if prompt.media and can.media_problem:
        raise ConfigError([f"{key}: row {prompt.uid} has images or videos: {can.media_problem}"])
    if prompt.media and not can.media:
        raise ConfigError(
            [
                f"{key}: row {prompt.uid} has images or videos, which rollout.backend = {config.rollout.backend} "
                f"cannot take with model.path = {config.model.path}; use a vision model and a backend that takes "
                "images, such as embedded, remove them from the data (data.image_key, data.video_key), or set "
                f"rollout.workflow = {config.rollout.workflow} to your own class, which uses them itself"
            ]
        )
    if not can.videos and any(item.content.kind == "video" for item in prompt.media):
        raise ConfigError(
            [
                f"{key}: row {prompt.uid} has a video, and rollout.backend = {config.rollout.backend} takes only "
                "images; use rollout.backend=embedded, or give the frames as images"
            ]
        )


def check_requests_fit(
    num_new: int, limits: EngineLimits, longest_prompt: int, key: str, key_of_limit: str = "rollout.max_new_tokens"
) -> None:
    """``longest_prompt`` is the number of tokens of the longest prompt of ``key``, data.train or data.eval, and
    ``num_new`` that of the longest response, which ``key_of_limit`` sets."""
    room = limits.max_request_tokens
    if longest_prompt + num_new <= room:
        return
    prompts = f"data.max_prompt_tokens to {room - num_new}" if room > num_new else ""
    responses = f"{key_of_limit} to {room - longest_prompt}" if room > longest_prompt else ""
    both = f"both data.max_prompt_tokens and {key_of_limit}"
    lower = " or ".join(each for each in (prompts, responses) if each) or both
    raise ConfigError(
        [
            f"{key_of_limit} = {num_new}: with the longest prompt of {key} ({longest_prompt} tokens) a request "
            f"needs {longest_prompt + num_new} tokens, and the engine's KV cache has room for {room}; raise "
            f"engine.kv_cache_gib or engine.memory_fraction, or lower {lower}"
        ]
    )


def check_stop_tokens(config: Config, engine: InferenceEngine) -> None:
    """Refuse stop tokens that the model does not have. Otherwise a run would find out at its first rollout."""
    size = engine.limits.vocab_size
    wrong = [token for token in config.rollout.stop_token_ids if token >= size]
    if wrong:
        raise ConfigError(
            [f"rollout.stop_token_ids: {wrong[0]} is not in the vocabulary of the model, 0..{size - 1}; remove it"]
        )
