"""Inference engines behind one interface (see ``core.engine.InferenceEngine``).

``embedded`` and ``hf`` run in this process. ``native`` talks to a ``headwater serve`` of any backend, which ``launch``
starts and keeps alive. ``fleet.make_fleet`` makes the engine of a run, a router if
it has several servers. A backend class has some of these constructors:

- ``from_context(BackendContext)``, for ``rollout.placement=colocated``: an engine in this process.
- ``connect(url, BackendContext)``, for a running server (``rollout.servers``).
- ``launch(BackendContext, devices)``, for ``rollout.placement=disaggregated``: start a server, and keep it alive.
- ``load(model_path, config, *, tokenizer, dtype, device, seed)``, for ``headwater serve``, which serves a class
  without ``launch``.

``declared_capabilities`` on the class is optional: what the config asks for is then checked before a model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from headwater.config.schema import Config, Dtype, EngineConfig
from headwater.core.capabilities import Capabilities
from headwater.core.errors import ConfigError, ModelError
from headwater.core.protocols import InferenceEngine, Tokenizer
from headwater.core.registry import Registry
from headwater.models.device import resolve_device
from headwater.models.load import vocabulary_size
from headwater.observe.spans import Spans

if TYPE_CHECKING:
    from headwater.backends.launch.child import StartChild

BACKENDS = Registry("backend", "headwater.backends")
SERVER_KEY = "HEADWATER_SERVER_KEY"
"""The environment variable with the API key of running servers."""


@runtime_checkable
class LoadsModels(Protocol):
    """A backend class whose engine ``headwater serve`` can serve."""

    def load(
        self, model_path: str, config: EngineConfig, *, tokenizer: Any, dtype: Dtype, device: str, seed: int
    ) -> InferenceEngine: ...


@runtime_checkable
class LaunchesServers(Protocol):
    """A backend class that starts its own servers and keeps them alive."""

    def launch(self, context: BackendContext, devices: Sequence[str]) -> InferenceEngine: ...


@dataclass(frozen=True)
class ServerPlace:
    """Where a server is started, if not on this machine."""

    name: str
    devices: tuple[str, ...]
    """As the server's process names them."""
    shares_device: bool
    """Whether the learner uses them too."""
    start_child: StartChild


@dataclass(frozen=True)
class BackendContext:
    """What every backend is created from."""

    config: Config
    model_path: str
    """A folder, hub id or built-in name; a checkpoint's model when a run is resumed."""
    tokenizer: Tokenizer
    spans: Spans
    owns_weights: bool = True
    """Whether this process decides which weights a running server uses. If not, they stay as they are."""
    is_one_of_many: bool = False
    """Other servers can continue the requests of this one: it raises ``ServerLost`` as soon as it is lost."""
    places: tuple[ServerPlace, ...] = ()
    """Where servers are started, one in each; empty starts those of ``rollout.launch`` on this machine. The context of
    one server has only its own place."""


def engine_settings(config: Config) -> EngineConfig:
    """The section ``engine``, with the adapters that ``rollout.publish=adapter`` needs."""
    if config.rollout.publish == "full":
        return config.engine
    lora = config.lora
    return replace(config.engine, adapter_rank=lora.rank, adapter_alpha=lora.alpha, adapter_targets=lora.targets)


def missing_capabilities(config: Config, can: Capabilities, *, replays: bool = False) -> list[str]:
    """What the config asks for and the engine cannot do. ``replays`` is true for a run that repeats a recorded one."""
    problems = []
    backend, mode = f"rollout.backend = {config.rollout.backend}", config.engine.update_mode
    if replays and not (can.seeded_sampling and can.resumable):
        problems.append(f"{backend}: cannot repeat a recorded run, because it has no seeded sampling; use embedded")
    if config.engine.deterministic and not can.seeded_sampling:
        problems.append(f"engine.deterministic = true: {backend} has no seeded sampling; use rollout.backend=embedded")
    if config.rollout.max_staleness > 0 and not can.per_token_versions:
        problems.append(
            f"rollout.max_staleness = {config.rollout.max_staleness}: {backend} does not tell which version produced a "
            "token; use 0, or rollout.backend=embedded"
        )
    if config.learner.offload_during_rollout and "kv_cache" not in can.memory_tags:
        problems.append(f"learner.offload_during_rollout = true: {backend} cannot release its KV cache; use false")
    # A backend with only one mode ignores the setting.
    if len(can.update_modes) > 1 and mode not in ("auto", *can.update_modes):
        problems.append(f"engine.update_mode = {mode}: {backend} only has {', '.join(can.update_modes)}")
    # Engines that the run makes itself get adapters.
    if config.rollout.publish == "adapter" and config.rollout.servers and not can.adapters:
        problems.append(
            "rollout.publish = adapter: a server has no adapters; start it with engine.adapter_rank="
            f"{config.lora.rank} and engine.adapter_alpha={config.lora.alpha}, or use rollout.publish=full"
        )
    return problems


def engine_device(wanted: str, learner: str, place: int = 0) -> tuple[str, bool]:
    """The device of a disaggregated engine, and whether the learner uses it too.

    ``wanted`` is ``rollout.device``, ``learner`` is ``model.device``. ``auto`` is the last GPU that no rank of the
    learner on this machine uses, or the learner's device if there is none. Engines with other values of ``place`` get
    other GPUs while there are some.
    """
    own = resolve_device(learner)
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    used = {own, *(torch.device(own.type, rank) for rank in range(num_ranks) if num_ranks > 1 and own.type == "cuda")}
    if wanted == "auto":
        num_gpus = torch.cuda.device_count() if own.type == "cuda" else 0
        free = [device for device in (torch.device("cuda", index) for index in range(num_gpus)) if device not in used]
        chosen = free[-1 - place % len(free)] if free else own
    else:
        try:
            chosen = resolve_device(wanted, "rollout.device")
        except ModelError as error:
            raise ConfigError([str(error)]) from error
    return str(chosen), chosen in used


def other_model(context: BackendContext, vocab_size: int) -> str | None:
    """What shows that a server with this vocabulary does not serve the model of the run, and the remedy.

    A server of another model with the same vocabulary refuses the weights, which every run publishes first.
    """
    own = vocabulary_size(context.model_path)
    if own == vocab_size:
        return None
    return (
        f"whose vocabulary has {vocab_size} tokens, but {context.model_path} has {own}; start the server with "
        f"{context.model_path}, or correct model.path"
    )


def check_lengths(context: BackendContext, model: Any) -> None:
    """Raise if the longest prompt and response that the recipe allows do not fit the model."""
    check_length(context, model.config.get_text_config().max_position_embeddings)


def check_length(context: BackendContext, limit: int) -> None:
    """As ``check_lengths``, for a model that takes ``limit`` tokens."""
    config = context.config
    needed = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > limit:
        raise ConfigError(
            [
                f"data.max_prompt_tokens + rollout.max_new_tokens = {needed}: over the {limit} positions of "
                f"{context.model_path}; lower one of them"
            ]
        )
