"""What training needs besides rollouts: the prompts, the learner and the experience maker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.corrections import configured_corrections
from headwater.algorithms.kl import AdaptiveKL, FixedKL, KLController
from headwater.config.arguments import with_arguments
from headwater.config.schema import AlgorithmConfig, Config
from headwater.core.errors import ConfigError
from headwater.core.learner import Learner
from headwater.data.load import PromptDataset, load_dataset
from headwater.data.prompt_builder import ToolsOfRow
from headwater.learner.build import LearnerBuilder, LearnerSpec, build_learner
from headwater.models.load import load_processor, load_tokenizer
from headwater.trainer.experience import ExperienceMaker


@dataclass(frozen=True)
class TrainingParts:
    config: Config
    """With the number of steps that ``trainer.total_epochs`` means for the training prompts."""
    train_data: PromptDataset
    learner: Learner
    experience: ExperienceMaker
    takes_media: bool = False
    """Whether the model takes images."""


def build_training(
    spec: LearnerSpec,
    tokenizer: Any,
    make_learner: LearnerBuilder | None = None,
    *,
    check_prompts: Callable[[Config, PromptDataset, str], None] | None = None,
    tools: ToolsOfRow | None = None,
) -> TrainingParts:
    """``make_learner`` builds the learner over several ranks; the default is one in this process.

    ``check_prompts`` is ``RolloutParts.check_prompts``. It is called before the learner is built. ``tools`` is
    ``RolloutParts.tools_of_row``.
    """
    config = spec.config
    algorithm = config.algorithm
    processor = load_processor(spec.model_path, config.model.chat_template)
    train_data = load_dataset(config.data, tokenizer, "train", config.run.seed, processor, tools)
    if train_data is None:
        raise ConfigError(["data.train = []: no prompts to train on; name a task or at least one file"])
    num_wanted = config.trainer.num_prompts_per_step
    if len(train_data) < num_wanted and not config.eval.only:
        raise ConfigError(
            [
                f"trainer.num_prompts_per_step = {num_wanted}: data.train has only {len(train_data)} prompts, so a "
                f"batch would contain some of them twice; lower it to {len(train_data)} or less, or add data"
            ]
        )
    config = with_total_steps(config, len(train_data))
    spec = replace(spec, config=config)
    if config.reference.path:
        check_reference(config.reference.path, tokenizer)
    if check_prompts is not None and not config.eval.only:
        check_prompts(config, train_data, "data.train")
    advantage = with_arguments(ADVANTAGES, algorithm.advantage, algorithm.advantage_args, "algorithm.advantage_args")
    # With the log-probs of the rollout the learner computes corrections itself, in every update.
    corrections = {} if algorithm.old_logprobs == "rollout" else configured_corrections(algorithm)
    learner = (make_learner or build_learner)(spec)
    profile, num_ranks = config.trainer.profile, learner.status().num_ranks
    if profile.steps and max(profile.ranks) >= num_ranks:
        learner.close()
        raise ConfigError(
            [
                f"trainer.profile.ranks = {list(profile.ranks)}: the learner has {num_ranks} ranks, and the first one "
                f"is 0; use 0 to {num_ranks - 1}"
            ]
        )
    experience = ExperienceMaker(
        config, advantage, corrections, _kl_controller(algorithm), learner, tokenizer.pad_token_id
    )
    return TrainingParts(config, train_data, learner, experience, takes_media=processor is not None)


def with_total_steps(config: Config, num_prompts: int) -> Config:
    """``trainer.total_epochs`` as a number of steps. Prompts that replace filtered groups do not count."""
    if not config.trainer.total_epochs:
        return config
    total = max(1, config.trainer.total_epochs * num_prompts // config.trainer.num_prompts_per_step)
    return replace(config, trainer=replace(config.trainer, total_steps=total))


def check_reference(path: str, tokenizer: Any) -> None:
    """Refuse a reference model whose tokens mean other texts than the policy's."""
    key = "reference.path"
    other = load_tokenizer(path, key=key).get_vocab()
    own = tokenizer.get_vocab()
    differing = [token for token in own if other.get(token) != own[token]] + [each for each in other if each not in own]
    if differing:
        raise ConfigError(
            [
                f"{key} = {path}: its tokenizer differs from that of model.path in {len(differing)} tokens, for "
                f"example {differing[0]!r}, so its log-probs would be those of other texts; use a model with the same "
                "tokenizer"
            ]
        )


def _kl_controller(algorithm: AlgorithmConfig) -> KLController:
    if algorithm.kl_target > 0:
        return AdaptiveKL(algorithm.kl_in_reward, target=algorithm.kl_target, horizon=algorithm.kl_horizon)
    return FixedKL(algorithm.kl_in_reward)
