"""From a config to the parts of a run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.policy_losses import POLICY_LOSSES
from headwater.backends import BACKENDS, BackendContext
from headwater.config.convert import WrongValue, convert_value
from headwater.config.schema import Config
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.protocols import InferenceEngine
from headwater.core.records import SamplingParams
from headwater.core.registry import Registry, is_path
from headwater.data.load import PromptDataset, load_dataset
from headwater.data.rlhf_dataset import RLHFDataset
from headwater.models.load import load_model, load_processor, load_tokenizer, resolve_dtype
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
    spans: Spans
    train_rollouts: WorkflowExecutor
    probe_rollouts: WorkflowExecutor
    """As training samples, but one response per prompt: a cheap look at where the policy stands."""
    eval_rollouts: WorkflowExecutor
    eval_data: PromptDataset | None
    loop: asyncio.Runner
    """The one event loop that all episodes run on."""

    def close(self) -> None:
        self.loop.close()
        self.engine.close()


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
    engine = BACKENDS.resolve(config.rollout.backend).from_context(BackendContext(config, model_path, tokenizer, spans))
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

    loop = asyncio.Runner()

    def executor(sampling: SamplingParams, num_samples: int) -> WorkflowExecutor:
        return WorkflowExecutor(
            engine,
            make_workflow(WorkflowContext(tokenizer, reward, sampling)),
            loop,
            num_samples=num_samples,
            timeout_s=config.rollout.timeout_s,
            on_failure=config.rollout.on_failure,
        )

    return RolloutParts(
        tokenizer=tokenizer,
        engine=engine,
        spans=spans,
        train_rollouts=executor(train_sampling, config.rollout.num_samples_per_prompt),
        probe_rollouts=executor(train_sampling, 1),
        eval_rollouts=executor(eval_sampling, config.eval.num_samples_per_prompt),
        eval_data=eval_data,
        loop=loop,
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
    # The learner keeps float32 weights whatever it computes in: small updates would vanish in a narrower type.
    model = load_model(model_path, dtype="float32", device=config.model.device, seed=config.run.seed)
    compute_dtype = resolve_dtype(config.model.dtype)
    actor = Actor(
        LocalTrainEngine(model, training, temperature=config.rollout.temperature, compute_dtype=compute_dtype),
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


def describe(dataset: PromptDataset | None, kind: str) -> str:
    """``4096 training prompts``, and how many were left out for their length."""
    if dataset is None:
        return f"no {kind} prompts"
    num_filtered = dataset.num_filtered if isinstance(dataset, RLHFDataset) else 0
    left_out = f" ({num_filtered} over data.max_prompt_tokens left out)" if num_filtered else ""
    return f"{len(dataset)} {kind} prompts{left_out}"


def with_arguments(registry: Registry, name: str, arguments: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """The extension with its configured keyword arguments bound; one it does not take is an error naming the key."""
    thing = registry.resolve(name)
    if not callable(thing):
        raise ConfigError([f"{key.removesuffix('_args')} = {name}: not callable; name a function or a class"])
    hints = get_type_hints(thing.__init__ if inspect.isclass(thing) else thing)
    parameters = inspect.signature(thing).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    problems, values = [], {}
    for argument, value in arguments.items():
        if argument in known:
            try:
                values[argument] = convert_value(hints.get(argument, Any), value)
            except WrongValue as error:
                problems.append(f"{key}.{argument} = {value!r}: {error}")
        elif takes_any:
            values[argument] = value
        else:
            takes = ", ".join(known) or "no arguments"
            problems.append(f"{key}.{argument}: no such argument; {registry.kind} {name!r} takes {takes}")
    if problems:
        raise ConfigError(problems)

    def call(*args: Any) -> Any:
        try:
            return thing(*args, **values)
        except HeadwaterError:
            raise
        except Exception as error:
            if not is_path(name):
                raise
            setting = f"{key.removesuffix('_args')} = {name}"
            raise HeadwaterError(
                f"{setting}: raised {type(error).__name__}: {error}; run with --debug to see where"
            ) from error

    return call
