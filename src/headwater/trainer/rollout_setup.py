"""Builds everything that generates and scores responses, from a config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from headwater.backends import BACKENDS, BackendContext, missing_capabilities
from headwater.backends.native.engine import NativeEngine
from headwater.config.arguments import with_arguments
from headwater.config.declared import read_declared
from headwater.config.schema import Config
from headwater.config.traits import AdvantageTraits
from headwater.core.errors import ConfigError
from headwater.core.protocols import Capabilities, InferenceEngine, MemoryTag
from headwater.core.records import SamplingParams
from headwater.core.registry import blaming
from headwater.data.load import PromptDataset, load_dataset
from headwater.data.rlhf_dataset import RLHFDataset
from headwater.models.load import load_processor, load_tokenizer
from headwater.observe.spans import Spans
from headwater.observe.trace import Trace
from headwater.rewards.managers import REWARD_MANAGERS
from headwater.rollout.executor import WorkflowExecutor
from headwater.rollout.group import Group
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.replay import RecordedSchedule, ReplayedRollouts
from headwater.rollout.source import RolloutSource
from headwater.rollout.staleness import Admission
from headwater.rollout.task_runner import AsyncTaskRunner
from headwater.workflows import WORKFLOWS, EpisodeRunner, WorkflowContext, make_runner

_CACHE: tuple[MemoryTag, ...] = ("kv_cache",)


@dataclass(frozen=True)
class RolloutParts:
    """Everything that generates and scores responses. Evaluation needs nothing else."""

    tokenizer: Any
    engine: InferenceEngine
    spans: Spans
    train_rollouts: RolloutSource
    probe_rollouts: WorkflowExecutor
    """Samples like training, but one response per prompt, to measure the policy cheaply."""
    eval_rollouts: WorkflowExecutor
    eval_data: PromptDataset | None
    tasks: AsyncTaskRunner
    """The event loop that runs all episodes."""
    trace: Trace | None

    def sleep_cache(self) -> None:
        """Release the memory of the KV cache until ``cache_awake``. The engine still accepts new weights."""
        self.engine.sleep(_CACHE)

    @contextmanager
    def cache_awake(self) -> Iterator[None]:
        """Have the KV cache in memory inside this block."""
        self.engine.wake(_CACHE)
        try:
            yield
        finally:
            self.sleep_cache()

    def close(self) -> None:
        try:
            self.tasks.close()
        finally:
            self.engine.close()


def make_engine(context: BackendContext, *, replays: bool = False) -> InferenceEngine:
    """The engine that ``rollout.placement`` and ``rollout.backend`` name, if it can do what the config asks for."""
    rollout = context.config.rollout
    backend = BACKENDS.resolve(rollout.backend)
    # If the class states what it can do, wrong settings are told before a model is loaded.
    declared: Capabilities | None = getattr(backend, "declared_capabilities", None)
    if declared is not None and (problems := missing_capabilities(context.config, declared, replays=replays)):
        raise ConfigError(problems)
    engine: InferenceEngine
    if rollout.placement == "disaggregated":
        if not hasattr(backend, "load"):
            raise ConfigError(
                [
                    f"rollout.placement = disaggregated: rollout.backend = {rollout.backend} cannot be served, because "
                    "it has no method load(model_path, ...); use rollout.placement=colocated"
                ]
            )
        engine = NativeEngine.from_context(context)
    else:
        engine = backend.from_context(context)
    if problems := missing_capabilities(context.config, engine.capabilities, replays=replays):
        engine.close()
        raise ConfigError(problems)
    return engine


def build_rollout(config: Config, model_path: str, schedule: RecordedSchedule | None = None) -> RolloutParts:
    """With ``schedule``, the rollouts of a recorded run are replayed. Otherwise new ones are generated."""
    trace = Trace() if config.trainer.trace else None
    spans = Spans(trace)
    tokenizer = load_tokenizer(model_path, chat_template=config.model.chat_template)
    processor = load_processor(model_path, config.model.chat_template)
    eval_data = load_dataset(config.data, tokenizer, "eval", config.run.seed, processor)
    with blaming(f"reward.manager = {config.reward.manager}"):
        make_reward = REWARD_MANAGERS.resolve(config.reward.manager)
    reward = make_reward(config.reward, spans)
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

    # Created last, after everything that can fail because of wrong settings: it has threads and may be a process.
    engine = make_engine(BackendContext(config, model_path, tokenizer, spans), replays=schedule is not None)
    tasks = AsyncTaskRunner()
    admission = make_admission(config)

    def group_runner(sampling: SamplingParams, num_samples: int, **options: Any) -> GroupRunner:
        return GroupRunner(
            workflow(sampling),
            num_samples=num_samples,
            on_failure=config.rollout.on_failure,
            max_retries=config.rollout.max_retries,
            allow_partial_groups=config.rollout.allow_partial_groups,
            **options,
        )

    def executor(groups: GroupRunner) -> WorkflowExecutor:
        return WorkflowExecutor(
            engine,
            groups,
            tasks,
            admission,
            timeout_s=config.rollout.timeout_s,
            episode_timeout_s=config.rollout.episode_timeout_s,
        )

    def replayed(groups: GroupRunner, schedule: RecordedSchedule) -> ReplayedRollouts:
        max_staleness, timeout_s = config.rollout.max_staleness, config.rollout.timeout_s
        return ReplayedRollouts(engine, groups, tasks, schedule, max_staleness=max_staleness, timeout_s=timeout_s)

    def workflow(sampling: SamplingParams) -> EpisodeRunner:
        context = WorkflowContext(tokenizer, reward, sampling, config.data.chat_template_args)
        return make_runner(config.rollout.workflow, make_workflow, context)

    advantage = read_declared(AdvantageTraits, config.algorithm.advantage)
    needs_greedy = advantage is not None and advantage.traits.needs_greedy_baseline
    greedy = replace(train_sampling, temperature=0.0, top_k=0, top_p=1.0) if needs_greedy else None
    train_groups = group_runner(
        train_sampling,
        config.rollout.num_samples_per_prompt,
        greedy=workflow(greedy) if greedy else None,
        should_accept=_scores_differ if config.algorithm.filter_groups else None,
    )
    return RolloutParts(
        tokenizer=tokenizer,
        engine=engine,
        spans=spans,
        train_rollouts=executor(train_groups) if schedule is None else replayed(train_groups, schedule),
        probe_rollouts=executor(group_runner(train_sampling, 1)),
        eval_rollouts=executor(group_runner(eval_sampling, config.eval.num_samples_per_prompt)),
        eval_data=eval_data,
        tasks=tasks,
        trace=trace,
    )


def make_admission(config: Config) -> Admission:
    rollout = config.rollout
    return Admission(
        batch_size=config.trainer.num_prompts_per_step,
        max_staleness=rollout.max_staleness,
        max_concurrent=rollout.max_concurrent_groups,
        num_batches=config.trainer.total_steps,
        on_stale=rollout.on_stale,
        # A deterministic engine gives the same result for any batch composition, so it does not need waves.
        in_waves=rollout.max_staleness == 0 and not config.engine.deterministic,
        holds_engine=rollout.placement == "colocated",
        max_rounds=config.algorithm.max_filter_rounds if config.algorithm.filter_groups else None,
    )


def _scores_differ(group: Group) -> bool:
    return len(set(group.episode_rewards())) > 1


def describe(dataset: PromptDataset | None, kind: str) -> str:
    """For example ``4096 training prompts``, and how many were left out because of their length."""
    if dataset is None:
        return f"no {kind} prompts"
    num_filtered = dataset.num_filtered if isinstance(dataset, RLHFDataset) else 0
    left_out = f" ({num_filtered} over data.max_prompt_tokens left out)" if num_filtered else ""
    return f"{len(dataset)} {kind} prompts{left_out}"
