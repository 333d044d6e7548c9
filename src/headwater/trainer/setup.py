"""From a config to the parts of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.policy_losses import POLICY_LOSSES
from headwater.backends import BACKENDS
from headwater.config.schema import Config
from headwater.core.errors import ConfigError
from headwater.core.protocols import InferenceEngine, RewardManager
from headwater.core.records import SamplingParams
from headwater.core.registry import Registry
from headwater.data.load import PromptDataset, load_dataset
from headwater.models.load import load_model, load_processor, load_tokenizer
from headwater.observe.spans import Spans
from headwater.rewards.managers import REWARD_MANAGERS
from headwater.rollout.executor import WorkflowExecutor
from headwater.trainer.experience import ExperienceMaker
from headwater.training.actor import Actor
from headwater.training.engine import LocalTrainEngine
from headwater.workflows import WORKFLOWS, WorkflowContext


@dataclass(frozen=True)
class RolloutParts:
    """What generates and scores responses: all that evaluation needs."""

    tokenizer: Any
    engine: InferenceEngine
    reward: RewardManager
    spans: Spans
    train_rollouts: WorkflowExecutor
    probe_rollouts: WorkflowExecutor
    """As training samples, but one response per prompt: a cheap look at where the policy stands."""
    eval_rollouts: WorkflowExecutor
    eval_data: PromptDataset | None

    def close(self) -> None:
        self.engine.close()
        self.reward.close()


@dataclass(frozen=True)
class TrainingParts:
    """What learns: the policy, its prompts and the making of experience."""

    train_data: PromptDataset
    actor: Actor
    experience: ExperienceMaker


def build_rollout(config: Config, model_path: str) -> RolloutParts:
    spans = Spans()
    tokenizer = load_tokenizer(model_path)
    eval_data = load_dataset(config.data, tokenizer, "eval", config.run.seed, load_processor(model_path))
    model = load_model(model_path, dtype=config.model.dtype, device=config.model.device, seed=config.run.seed)
    engine = BACKENDS.resolve(config.rollout.backend)(
        model, tokenizer, max_batch_sequences=config.rollout.max_batch_sequences, spans=spans
    )
    reward = REWARD_MANAGERS.resolve(config.reward.manager)(config.reward, spans)
    make_workflow = with_arguments(
        WORKFLOWS, config.rollout.workflow, config.rollout.workflow_args, "rollout.workflow_args"
    )
    train_sampling = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
    )
    eval_sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens, temperature=config.eval.temperature)

    def executor(sampling: SamplingParams, num_samples: int) -> WorkflowExecutor:
        return WorkflowExecutor(
            engine,
            make_workflow(WorkflowContext(tokenizer, reward, sampling)),
            num_samples=num_samples,
            timeout_s=config.rollout.timeout_s,
            on_failure=config.reward.on_failure,
        )

    return RolloutParts(
        tokenizer=tokenizer,
        engine=engine,
        reward=reward,
        spans=spans,
        train_rollouts=executor(train_sampling, config.rollout.num_samples_per_prompt),
        probe_rollouts=executor(train_sampling, 1),
        eval_rollouts=executor(eval_sampling, config.eval.num_samples_per_prompt),
        eval_data=eval_data,
    )


def build_training(config: Config, model_path: str, tokenizer: Any) -> TrainingParts:
    algorithm, training = config.algorithm, config.training
    train_data = load_dataset(config.data, tokenizer, "train", config.run.seed, load_processor(model_path))
    if train_data is None:
        raise ConfigError(["data.train = []: no prompts to train on; name a task or at least one file"])
    policy_loss = with_arguments(
        POLICY_LOSSES, algorithm.policy_loss, algorithm.policy_loss_args, "algorithm.policy_loss_args"
    )
    advantage = with_arguments(ADVANTAGES, algorithm.advantage, algorithm.advantage_args, "algorithm.advantage_args")
    model = load_model(model_path, dtype=config.model.dtype, device=config.model.device, seed=config.run.seed)
    actor = Actor(
        LocalTrainEngine(model, training, temperature=config.rollout.temperature),
        policy_loss,
        num_minibatches=training.num_minibatches,
        num_epochs=training.num_epochs,
        skip_zero_advantages=training.skip_zero_advantages,
    )
    experience = ExperienceMaker(
        advantage,
        actor,
        recompute_old_logprobs=algorithm.old_logprobs == "recompute",
        pad_token_id=tokenizer.pad_token_id,
    )
    return TrainingParts(train_data, actor, experience)


def with_arguments(registry: Registry, name: str, arguments: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """The extension with its configured keyword arguments bound; one it does not take is an error naming the key."""
    thing = registry.resolve(name)
    parameters = inspect.signature(thing).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        unknown = [argument for argument in arguments if argument not in known]
        if unknown:
            takes = f"{registry.kind} {name!r} takes {', '.join(known) or 'no arguments'}"
            raise ConfigError([f"{key}.{each}: no such argument; {takes}" for each in unknown])

    def call(*args: Any) -> Any:
        return thing(*args, **arguments)

    return call
