"""What training needs besides rollouts: the prompts, the learner and the experience maker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.corrections import configured_corrections
from headwater.algorithms.kl import AdaptiveKL, FixedKL, KLController
from headwater.config.arguments import with_arguments
from headwater.config.schema import AlgorithmConfig, Config
from headwater.core.errors import ConfigError
from headwater.core.protocols import Learner
from headwater.data.load import PromptDataset, load_dataset
from headwater.data.prompt_builder import ToolsOfRow
from headwater.learner.build import LearnerBuilder, LearnerSpec, build_learner
from headwater.models.load import load_processor
from headwater.trainer.experience import ExperienceMaker


@dataclass(frozen=True)
class TrainingParts:
    train_data: PromptDataset
    learner: Learner
    experience: ExperienceMaker


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
    if len(train_data) < num_wanted:
        raise ConfigError(
            [
                f"trainer.num_prompts_per_step = {num_wanted}: data.train has only {len(train_data)} prompts, so a "
                f"batch would contain some of them twice; lower it to {len(train_data)} or less, or add data"
            ]
        )
    if check_prompts is not None:
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
    return TrainingParts(train_data, learner, experience)


def _kl_controller(algorithm: AlgorithmConfig) -> KLController:
    if algorithm.kl_target > 0:
        return AdaptiveKL(algorithm.kl_in_reward, target=algorithm.kl_target, horizon=algorithm.kl_horizon)
    return FixedKL(algorithm.kl_in_reward)
