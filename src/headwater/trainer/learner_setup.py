"""What training needs besides rollouts: the prompts, the learner and the experience maker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.corrections import CORRECTIONS
from headwater.algorithms.kl import AdaptiveKL, FixedKL, KLController
from headwater.config.arguments import with_arguments
from headwater.config.schema import AlgorithmConfig
from headwater.core.errors import ConfigError
from headwater.core.protocols import Learner
from headwater.data.load import PromptDataset, load_dataset
from headwater.learner.build import LearnerBuilder, LearnerSpec, build_learner
from headwater.models.load import load_processor
from headwater.trainer.experience import CorrectionFunction, ExperienceMaker


@dataclass(frozen=True)
class TrainingParts:
    train_data: PromptDataset
    learner: Learner
    experience: ExperienceMaker


def build_training(spec: LearnerSpec, tokenizer: Any, make_learner: LearnerBuilder | None = None) -> TrainingParts:
    """``make_learner`` builds the learner over several ranks; the default is one in this process."""
    config = spec.config
    algorithm = config.algorithm
    processor = load_processor(spec.model_path, config.model.chat_template)
    train_data = load_dataset(config.data, tokenizer, "train", config.run.seed, processor)
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
    advantage = with_arguments(ADVANTAGES, algorithm.advantage, algorithm.advantage_args, "algorithm.advantage_args")
    corrections = _corrections(algorithm)
    learner = (make_learner or build_learner)(spec)
    experience = ExperienceMaker(
        config, advantage, corrections, _kl_controller(algorithm), learner, tokenizer.pad_token_id
    )
    return TrainingParts(train_data, learner, experience)


def _kl_controller(algorithm: AlgorithmConfig) -> KLController:
    if algorithm.kl_target > 0:
        return AdaptiveKL(algorithm.kl_in_reward, target=algorithm.kl_target, horizon=algorithm.kl_horizon)
    return FixedKL(algorithm.kl_in_reward)


def _corrections(algorithm: AlgorithmConfig) -> dict[str, CorrectionFunction]:
    """Corrections by the name that their metrics use: for a dotted path, the name of the function."""
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
