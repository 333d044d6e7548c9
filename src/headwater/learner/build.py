"""Builds the learner of one process from a config: all of it, or one rank's shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from headwater.algorithms.corrections import configured_corrections
from headwater.algorithms.policy_losses import POLICY_LOSSES
from headwater.config.arguments import with_arguments
from headwater.config.schema import Config, LearnerConfig
from headwater.core.errors import ConfigError
from headwater.core.learner import Learner
from headwater.learner.actor import Actor
from headwater.learner.critic import Critic
from headwater.learner.engine import ForwardEngine, TrainEngine
from headwater.learner.freeze import freeze_parts, vision_modules
from headwater.learner.learner import LocalLearner
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule, ValueModule
from headwater.learner.ranks import Ranks, allow_waits
from headwater.learner.reward_model import RewardModel
from headwater.models.device import check_float16, sum_in_one_order, with_dtype
from headwater.models.load import (
    load_model,
    load_part,
    load_processor,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from headwater.models.scored import (
    CRITIC_KEY,
    REWARD_KEY,
    load_critic,
    load_critic_part,
    load_reward_model,
    load_reward_part,
)
from headwater.models.sharded_load import ShardReader
from headwater.models.vision import VisionProcessor

_REFERENCE_KEY = "reference.path"


@dataclass(frozen=True)
class LearnerSpec:
    """What a rank needs to know to build its part of the learner."""

    config: Config
    model_path: str
    """The policy to start from: the model of the config, or a checkpoint's."""
    reference_path: str
    """The reference policy: ``reference.path``, the model of the config, or the result of a warm start."""


class _Processors:
    """The processors of vision models. Roles with the same model share one, and with it what it has read."""

    def __init__(self) -> None:
        self._of_path: dict[str, VisionProcessor | None] = {}

    def of(self, path: str, key: str = "model.path") -> VisionProcessor | None:
        if path not in self._of_path:
            self._of_path[path] = load_processor(path, key=key)
        return self._of_path[path]


LearnerBuilder = Callable[[LearnerSpec], Learner]


def build_learner(spec: LearnerSpec) -> LocalLearner:
    """The learner of this process. With several ranks every rank calls it and reads only its shard of each model."""
    config = _repeatable(with_dtype(spec.config))
    allow_waits(config.learner.rank_timeout_s)
    check_float16(config)
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    algorithm = config.algorithm
    policy_loss = with_arguments(
        POLICY_LOSSES, algorithm.policy_loss, algorithm.policy_loss_args, "algorithm.policy_loss_args"
    )
    corrections = configured_corrections(algorithm) if algorithm.old_logprobs == "rollout" else {}
    # Adapters are added to the model they were trained for; a checkpoint's model/ has them merged. Frozen weights are
    # those of that model, too: a checkpoint's model/ may be of a narrower number type (trainer.checkpoint_dtype).
    is_partial = config.lora.rank or config.learner.freeze
    processors = _Processors()
    engine = _policy_engine(config, config.model.path if is_partial else spec.model_path, processors)
    return LocalLearner(
        config,
        Actor(engine, policy_loss, algorithm, loss_width=config.rollout.max_new_tokens, corrections=corrections),
        load_tokenizer(spec.model_path, chat_template=config.model.chat_template),
        critic=_critic(config, processors) if config.critic.enabled else None,
        reference=_reference(config, engine, spec.reference_path, processors) if uses_reference(config) else None,
        reward_model=_reward_model(config) if config.reward.model else None,
    )


def _repeatable(config: Config) -> Config:
    """With ``run.deterministic``, gradients are summed in one order, without joined projections and CUDA graphs.

    Whether there is room for those when the model is loaded would decide how gradients are rounded.
    """
    if not config.run.deterministic:
        return config
    if resolve_device(config.model.device).type == "cuda":
        sum_in_one_order()
    return replace(config, learner=replace(config.learner, join_projections=False, cuda_graphs="off"))


def uses_reference(config: Config) -> bool:
    return config.algorithm.kl_in_loss > 0 or config.algorithm.kl_in_reward > 0


def _policy(config: Config, path: str, dtype: str) -> tuple[Any, ShardReader | None]:
    if Ranks.current().count > 1:
        return load_part(path, dtype=dtype, seed=config.run.seed)
    return load_model(path, dtype=dtype, device=config.model.device, seed=config.run.seed), None


def _policy_engine(config: Config, path: str, processors: _Processors) -> TrainEngine:
    # Trained weights are float32 whatever the passes compute in: small updates would vanish in a narrower type.
    model, weights = _policy(config, path, config.model.dtype if config.lora.rank else "float32")
    freeze_parts(model, config.learner.freeze)
    module = PolicyModule(model, config.rollout.temperature, processors.of(path))
    if config.lora.rank:
        add_adapters(model, config.lora, seed=config.run.seed)
    if "vision" in config.learner.freeze and module.trains_vision:
        raise ConfigError(
            [
                f"lora.targets = {list(config.lora.targets)}: names layers of the vision tower, which learner.freeze = "
                "[vision] keeps as they are; remove them from one of the two"
            ]
        )
    return TrainEngine(
        module,
        config.learner,
        compute_dtype=resolve_dtype(config.model.dtype),
        device=resolve_device(config.model.device),
        weights=weights,
        num_decay_steps=_num_actor_steps(config),
    )


def _critic(config: Config, processors: _Processors) -> Critic:
    path = config.critic.path or config.model.path
    weights: ShardReader | None = None
    if Ranks.current().count > 1:
        model, weights = load_critic_part(path, dtype="float32", seed=config.run.seed)
    else:
        model = load_critic(path, dtype="float32", device=config.model.device, seed=config.run.seed)
    if vision_modules(model):
        freeze_parts(model, config.learner.freeze)
    settings = critic_settings(config)
    engine = TrainEngine(
        ValueModule(model, processors.of(path, CRITIC_KEY)),
        settings,
        compute_dtype=resolve_dtype(config.model.dtype),
        device=resolve_device(config.model.device),
        weights=weights,
        num_decay_steps=_num_optimizer_steps(settings, config.trainer.total_steps),
    )
    return Critic(engine, config.critic, config.algorithm, loss_width=config.rollout.max_new_tokens)


_OF_CRITIC = (
    *("warmup_fraction", "schedule", "lowest_learning_rate_fraction", "num_epochs", "num_minibatches"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
)


def critic_settings(config: Config) -> LearnerConfig:
    """The learner's settings, with those that the critic has itself."""
    own: dict[str, Any] = {name: value for name in _OF_CRITIC if (value := getattr(config.critic, name)) is not None}
    if config.critic.warmup_fraction is not None:
        own["num_warmup_steps"] = 0  # the learner's number would take precedence
    return replace(config.learner, learning_rate=config.critic.learning_rate, **own)


def _reference(config: Config, policy: TrainEngine, path: str, processors: _Processors) -> ForwardEngine:
    if config.lora.rank and not config.reference.path:
        return policy
    path = config.reference.path or path
    model, weights = _policy(config, path, config.model.dtype)
    module = PolicyModule(model.requires_grad_(False), config.rollout.temperature, processors.of(path, _REFERENCE_KEY))
    return _frozen(config, module, weights)


def _reward_model(config: Config) -> RewardModel:
    path = config.reward.model
    weights: ShardReader | None = None
    if Ranks.current().count > 1:
        model, weights = load_reward_part(path, dtype=config.model.dtype)
    else:
        model = load_reward_model(path, dtype=config.model.dtype, device=config.model.device)
    tokenizer = load_tokenizer(path, key=REWARD_KEY)
    return RewardModel(_frozen(config, ValueModule(model.requires_grad_(False)), weights), tokenizer)


def _frozen(config: Config, module: PolicyModule | ValueModule, weights: ShardReader | None) -> ForwardEngine:
    dtype, device = resolve_dtype(config.model.dtype), resolve_device(config.model.device)
    return ForwardEngine(module, config.learner, compute_dtype=dtype, device=device, weights=weights)


def _num_actor_steps(config: Config) -> int:
    num_waiting = config.critic.num_warmup_steps if config.critic.enabled else 0
    return _num_optimizer_steps(config.learner, max(0, config.trainer.total_steps - num_waiting))


def _num_optimizer_steps(settings: LearnerConfig, num_steps: int) -> int:
    return num_steps * settings.num_minibatches * settings.num_epochs
