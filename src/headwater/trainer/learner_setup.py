"""From a config to what learns: the policy, who helps it, and the making of experience."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.corrections import CORRECTIONS
from headwater.algorithms.kl import AdaptiveKL, FixedKL, KLController
from headwater.algorithms.policy_losses import POLICY_LOSSES
from headwater.config.schema import AlgorithmConfig, Config
from headwater.core.errors import ConfigError, ModelError
from headwater.data.load import PromptDataset, load_dataset
from headwater.learner.actor import Actor
from headwater.learner.critic import Critic
from headwater.learner.engine import ForwardEngine, TrainEngine
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule, ValueModule
from headwater.learner.reference import AdapterReference, FrozenReference, Reference
from headwater.learner.reward_model import RewardModel
from headwater.models.checksum import checksum
from headwater.models.load import load_model, load_processor, load_tokenizer, resolve_dtype
from headwater.models.save import save_model
from headwater.models.scored import load_critic, load_reward_model
from headwater.trainer.arguments import with_arguments
from headwater.trainer.experience import CorrectionFunction, ExperienceMaker
from headwater.weights.memory import copy_weights


@dataclass(frozen=True)
class TrainingParts:
    train_data: PromptDataset
    actor: Actor
    critic: Critic | None
    reference: Reference | None
    experience: ExperienceMaker

    def offload(self) -> None:
        """Make room on the device for a rollout: every model of the learner goes to main memory."""
        for model in self._models():
            model.offload()

    def onload(self) -> None:
        for model in self._models():
            model.onload()

    def _models(self) -> Iterator[ForwardEngine | RewardModel]:
        if self.experience.reward_model is not None:
            yield self.experience.reward_model
        if isinstance(self.reference, FrozenReference):
            yield self.reference.engine
        if self.critic is not None:
            yield self.critic.engine
        yield self.actor.engine

    def checksum(self, policy: str) -> str:
        """The checksum of everything that is trained; ``policy`` is the one of the policy's weights."""
        if self.critic is None:
            return policy
        return f"{policy} critic {checksum(self.critic.engine.export_weights())}"

    def load(self, checkpoint: Path) -> None:
        self.actor.engine.load(checkpoint)
        if self.critic is not None:
            self.critic.engine.load(checkpoint / "critic")

    def start_reference(self, folder: Path, tokenizer: Any) -> None:
        """The policy as it stands is the reference from now on; ``folder`` keeps it for a run that is resumed."""
        if isinstance(self.reference, FrozenReference):
            model = self.reference.engine.module.model
            copy_weights(model, self.actor.engine.export_weights())
            # What is there already is of a start that was made again, because it never came to a checkpoint.
            shutil.rmtree(folder, ignore_errors=True)
            save_model(model, tokenizer, folder)


def build_training(config: Config, model_path: str, tokenizer: Any, *, reference_path: str) -> TrainingParts:
    """``model_path`` holds the policy to go on from, ``reference_path`` the one it started from."""
    algorithm = config.algorithm
    train_data = load_dataset(config.data, tokenizer, "train", config.run.seed, load_processor(model_path))
    if train_data is None:
        raise ConfigError(["data.train = []: no prompts to train on; name a task or at least one file"])
    num_wanted = config.trainer.num_prompts_per_step
    if len(train_data) < num_wanted:
        raise ConfigError(
            [
                f"trainer.num_prompts_per_step = {num_wanted}: data.train has only {len(train_data)} prompts, so a "
                f"batch would hold some of them twice; lower it to {len(train_data)} or less, or add data"
            ]
        )
    policy_loss = with_arguments(
        POLICY_LOSSES, algorithm.policy_loss, algorithm.policy_loss_args, "algorithm.policy_loss_args"
    )
    advantage = with_arguments(ADVANTAGES, algorithm.advantage, algorithm.advantage_args, "algorithm.advantage_args")
    corrections = _corrections(algorithm)
    # Adapters go back onto the model they were made for; a checkpoint's own folder has them merged in.
    policy_path = config.model.path if config.lora.rank else model_path
    engine = _policy_engine(config, policy_path)
    actor = Actor(engine, policy_loss, algorithm, loss_width=config.rollout.max_new_tokens)
    critic = _critic(config) if config.critic.enabled else None
    reference = _reference(config, engine, reference_path)
    experience = ExperienceMaker(
        config,
        advantage,
        corrections,
        _kl_controller(algorithm),
        actor,
        critic,
        reference,
        _reward_model(config) if config.reward.model else None,
        tokenizer.pad_token_id,
    )
    return TrainingParts(train_data, actor, critic, reference, experience)


def _policy_engine(config: Config, path: str) -> TrainEngine:
    # What is trained is float32 whatever the passes compute in: small updates would vanish in a narrower type.
    dtype = config.model.dtype if config.lora.rank else "float32"
    model = load_model(path, dtype=dtype, device=config.model.device, seed=config.run.seed)
    module = PolicyModule(model, config.rollout.temperature)
    if config.lora.rank:
        add_adapters(model, config.lora, seed=config.run.seed)
    return TrainEngine(
        module,
        config.learner,
        compute_dtype=resolve_dtype(config.model.dtype),
        num_decay_steps=_num_actor_steps(config),
    )


def _critic(config: Config) -> Critic:
    path = config.critic.path or config.model.path
    with _blaming("critic.path"):
        model = load_critic(path, dtype="float32", device=config.model.device, seed=config.run.seed)
    engine = TrainEngine(
        ValueModule(model),
        replace(config.learner, learning_rate=config.critic.learning_rate),
        compute_dtype=resolve_dtype(config.model.dtype),
        num_decay_steps=_num_optimizer_steps(config, config.trainer.total_steps),
    )
    return Critic(engine, config.critic, config.algorithm, loss_width=config.rollout.max_new_tokens)


def _reference(config: Config, policy: TrainEngine, path: str) -> Reference | None:
    if config.algorithm.kl_in_loss == 0 and config.algorithm.kl_in_reward == 0:
        return None
    if config.lora.rank:
        return AdapterReference(policy)
    model = load_model(path, dtype=config.model.dtype, device=config.model.device, seed=config.run.seed)
    module = PolicyModule(model.requires_grad_(False), config.rollout.temperature)
    return FrozenReference(ForwardEngine(module, config.learner, compute_dtype=resolve_dtype(config.model.dtype)))


def _reward_model(config: Config) -> RewardModel:
    path = config.reward.model
    with _blaming("reward.model"):
        model = load_reward_model(path, dtype=config.model.dtype, device=config.model.device)
        tokenizer = load_tokenizer(path)
    return RewardModel(ValueModule(model.requires_grad_(False)), tokenizer, config.learner)


@contextmanager
def _blaming(key: str) -> Iterator[None]:
    """What goes wrong in loading a model is blamed on ``model.path``; here another key names it."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", key)) from error


def _num_actor_steps(config: Config) -> int:
    num_waiting = config.critic.num_warmup_steps if config.critic.enabled else 0
    return _num_optimizer_steps(config, max(0, config.trainer.total_steps - num_waiting))


def _num_optimizer_steps(config: Config, num_steps: int) -> int:
    return num_steps * config.learner.num_minibatches * config.learner.num_epochs


def _kl_controller(algorithm: AlgorithmConfig) -> KLController:
    if algorithm.kl_target > 0:
        return AdaptiveKL(algorithm.kl_in_reward, target=algorithm.kl_target, horizon=algorithm.kl_horizon)
    return FixedKL(algorithm.kl_in_reward)


def _corrections(algorithm: AlgorithmConfig) -> dict[str, CorrectionFunction]:
    """By the name that their metrics go by: of one's own correction that is the function's."""
    unknown = [name for name in algorithm.corrections_args if name not in algorithm.corrections]
    if unknown:
        reason = "algorithm.corrections does not name it; add it there, or remove this"
        raise ConfigError([f"algorithm.corrections_args.{name}: {reason}" for name in unknown])
    return {
        name.rpartition(":")[2]: with_arguments(
            CORRECTIONS, name, algorithm.corrections_args.get(name, {}), f"algorithm.corrections_args.{name}"
        )
        for name in algorithm.corrections
    }
