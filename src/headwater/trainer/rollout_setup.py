"""Builds everything that generates and scores responses, from a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from headwater.backends import BACKENDS, BackendContext, ServerPlace, missing_capabilities
from headwater.backends.fleet import connect_server, make_fleet
from headwater.chat.parsers import make_parser
from headwater.config.declared import read_declared
from headwater.config.keys import value_at
from headwater.config.schema import Config, WeightTransfer
from headwater.config.traits import AdvantageTraits
from headwater.core.capabilities import Capabilities, MemoryTag
from headwater.core.errors import ConfigError
from headwater.core.protocols import InferenceEngine
from headwater.core.records import DropKind, Prompt, RewardManager, Trajectory
from headwater.core.registry import blaming, is_path
from headwater.core.requests import SamplingParams
from headwater.data.load import MeasuredDataset, PromptDataset, load_dataset
from headwater.data.media import MediaSettings
from headwater.data.prompt_builder import ToolsOfRow
from headwater.models.device import with_dtype
from headwater.models.load import load_processor, load_tokenizer
from headwater.observe.run_directory import RunDirectory
from headwater.observe.spans import Spans
from headwater.observe.trace import Trace
from headwater.rewards.managers import REWARD_MANAGERS, LateScores
from headwater.rewards.pool import CallPool
from headwater.rewards.scoring import Scoring
from headwater.rollout.dispatcher import AsyncTaskRunner
from headwater.rollout.executor import WorkflowExecutor
from headwater.rollout.group import TrajectoryLimits
from headwater.rollout.group_runner import GroupFilter, GroupRunner, load_should_accept, scores_differ
from headwater.rollout.replay import RecordedSchedule, ReplayedRollouts
from headwater.rollout.source import RolloutSource
from headwater.rollout.staleness import Admission
from headwater.tools.toolbox import MakesTools, Toolbox
from headwater.trainer.request_checks import Needs, check_answers, check_stop_tokens, first_prompts
from headwater.workflows import EpisodeRunner, WorkflowContext, bind_workflow

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
    tools_of_row: ToolsOfRow | None
    """The tools that prompts offer to the model; None if the run has none."""
    check_prompt: Callable[[Prompt], None]
    """Raise an error for a prompt that the reward function cannot score, or that names tools that do not exist."""
    reads_column: Callable[[str], bool]
    """Whether the reward function takes a column of the data. True if that is not known."""
    runs_code: Callable[[Prompt], bool]
    """Whether a tool, or the scorer of a prompt, runs code in the sandbox. True if that is not known."""
    unread_settings: Callable[[Prompt], Collection[str]]
    """The settings of ``reward`` that have no effect on the scorers of a prompt. None if that is not known."""
    reward_counts: Callable[[], Mapping[str, float]]
    """Metrics about failed scoring calls since it was last called. A custom reward manager may have none."""
    reward_failures: Callable[[], Mapping[str, Mapping[str, Any]]]
    """Failed scoring calls of the run by cause, each with its count and a message."""
    close_reward: Callable[[], object]
    open_calls: Callable[[RunDirectory, PromptDataset], AbstractContextManager[object]]
    """Within the block, ``headwater servers`` can list and change the servers of the run, if it has several. Takes the
    training data, which another server must be able to answer."""
    join_scores: Callable[[Trajectory], Trajectory] | None = None
    """With ``reward.join: late``, adds the score to a trajectory of a training batch."""

    def sleep_cache(self) -> None:
        """Release the memory of the KV cache until it is woken. The engine still accepts new weights."""
        self.engine.sleep(_CACHE)

    def check_prompts(self, config: Config, dataset: PromptDataset, key: str) -> None:
        """Refuse prompts that the engine could not answer or the reward function could not score.

        Otherwise a run would find out at its first rollout.
        """
        self.check_prompt(next(first_prompts(config, dataset, key)))
        check_answers(config, self.engine, dataset, key)

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.engine.close)
            stack.callback(self.close_reward)
            stack.callback(self.tasks.close)


def make_engine(context: BackendContext, *, replays: bool = False) -> InferenceEngine:
    """The engine or the servers of the config, if they can do what it asks for."""
    backend = BACKENDS.resolve(context.config.rollout.backend)
    # If the class states what it can do, wrong settings are reported before a model is loaded.
    declared: Capabilities | None = getattr(backend, "declared_capabilities", None)
    if declared is not None and (problems := missing_capabilities(context.config, declared, replays=replays)):
        raise ConfigError(problems)
    engine = make_fleet(context)
    if problems := missing_capabilities(context.config, engine.capabilities, replays=replays):
        engine.close()
        raise ConfigError(problems)
    return engine


@dataclass(frozen=True)
class RemoteParts:
    """What runs in a cluster instead of on this machine."""

    places: tuple[ServerPlace, ...] = ()
    """Where servers are started."""
    reward_pool: CallPool | None = None
    """Where scoring functions run."""
    weight_transfer: WeightTransfer | None = None
    """How weights reach servers that are not on this machine; None leaves the choice to ``rollout.weight_transfer``."""
    tools: MakesTools | None = None
    """Where tools run."""

    def told(self, config: Config) -> Config:
        """The config for the servers."""
        if self.weight_transfer is None:
            return config
        return replace(config, rollout=replace(config.rollout, weight_transfer=self.weight_transfer))


def build_rollout(
    config: Config,
    model_path: str,
    schedule: RecordedSchedule | None = None,
    remote: RemoteParts | None = None,
) -> RolloutParts:
    """With ``schedule``, the rollouts of a recorded run are replayed. Otherwise new ones are generated."""
    with ExitStack() as after_failure:
        parts = _build(with_dtype(config), model_path, schedule, remote or RemoteParts(), after_failure)
        after_failure.pop_all()
    return parts


def _build(
    config: Config,
    model_path: str,
    schedule: RecordedSchedule | None,
    remote: RemoteParts,
    after_failure: ExitStack,
) -> RolloutParts:
    """``after_failure`` closes what was made before something fails."""
    trace = Trace() if config.trainer.trace else None
    spans = Spans(trace)
    tokenizer = load_tokenizer(model_path, chat_template=config.model.chat_template)
    processor = load_processor(model_path, config.model.chat_template)
    media = MediaSettings.of(config.data)
    shown = media if processor is not None else None
    toolbox = Toolbox.from_config(config.tools, config.sandbox, tokenizer, remote.tools, shown)
    if toolbox is not None:
        after_failure.callback(toolbox.close_unused)
    parser = make_parser(config.tools.parser, tokenizer) if toolbox is not None else None
    offered = toolbox.offered if toolbox is not None else None
    eval_data = load_dataset(config.data, tokenizer, "eval", config.run.seed, processor, offered)
    with blaming(f"reward.manager = {config.reward.manager}"):
        make_reward = REWARD_MANAGERS.resolve(config.reward.manager)
    sandbox = {"sandbox": config.sandbox} if "sandbox" in inspect.signature(make_reward).parameters else {}
    reward = make_reward(config.reward, spans, **sandbox)
    check_prompt = _prompt_check(config, reward, toolbox)
    if eval_data is not None:
        check_prompt(eval_data[0])
    elif asking := [key for key in ("eval.only", "trainer.best_metric") if value_at(config, key)]:
        raise ConfigError([f"{asking[0]}: there are no held-out prompts to evaluate on; name some in data.eval"])
    make_workflow = bind_workflow(config.rollout.workflow, config.rollout.workflow_args)
    filters = _filters(config)
    train_sampling, eval_sampling = make_sampling(config)

    # Created last, after everything that can fail because of wrong settings: it has threads and may be a process.
    context = BackendContext(remote.told(config), model_path, tokenizer, spans, places=remote.places)
    engine = make_engine(context, replays=schedule is not None)
    after_failure.callback(engine.close)
    check_stop_tokens(config, engine)
    if isinstance(reward, Scoring):
        after_failure.callback(reward.close)
        if remote.reward_pool is not None:
            reward.use(remote.reward_pool)
        reward.start()
    tasks = AsyncTaskRunner()
    after_failure.callback(tasks.close)
    if toolbox is not None:
        tasks.at_end(toolbox.close)
    admission = make_admission(config)
    limits = TrajectoryLimits(
        vocab_size=engine.limits.vocab_size,
        max_new_tokens=config.rollout.max_new_tokens,
        max_prompt_tokens=config.data.max_prompt_tokens,
        get_version=engine.get_version,
    )

    def group_runner(sampling: SamplingParams, num_samples: int, **options: Any) -> GroupRunner:
        return GroupRunner(
            options.pop("workflow", None) or workflow(sampling),
            num_samples=num_samples,
            on_failure=config.rollout.on_failure,
            max_retries=config.rollout.max_retries,
            allow_partial_groups=config.rollout.allow_partial_groups,
            limits=replace(limits, max_new_tokens=sampling.max_new_tokens),
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

    late = LateScores(reward, timeout_s=config.rollout.timeout_s) if config.reward.join == "late" else None

    def workflow(sampling: SamplingParams, scores: RewardManager = reward) -> EpisodeRunner:
        context = WorkflowContext(
            tokenizer,
            scores,
            sampling,
            config.data.chat_template_args,
            max_prompt_tokens=config.data.max_prompt_tokens,
            tools=toolbox,
            parser=parser,
            processor=processor,
            media_settings=media,
        )
        return make_workflow(context)

    advantage = read_declared(AdvantageTraits, config.algorithm.advantage)
    needs_greedy = advantage is not None and advantage.traits.needs_greedy_baseline
    greedy = replace(train_sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0) if needs_greedy else None
    train_groups = group_runner(
        train_sampling,
        config.rollout.num_samples_per_prompt,
        workflow=workflow(train_sampling, late or reward),
        greedy=workflow(greedy) if greedy else None,
        filters=filters,
    )
    is_evaluated = config.eval.before or config.eval.after or config.eval.is_repeated or config.eval.only
    checked = {"data.eval": eval_data} if eval_data is not None and is_evaluated else {}
    parts = RolloutParts(
        tokenizer=tokenizer,
        engine=engine,
        spans=spans,
        train_rollouts=executor(train_groups) if schedule is None else replayed(train_groups, schedule),
        probe_rollouts=executor(group_runner(train_sampling, 1)),
        eval_rollouts=executor(group_runner(eval_sampling, config.eval.num_samples_per_prompt)),
        eval_data=eval_data,
        tasks=tasks,
        trace=trace,
        tools_of_row=offered,
        check_prompt=check_prompt,
        reads_column=getattr(reward, "reads_column", lambda name: True),
        runs_code=_code_check(config, reward, toolbox),
        unread_settings=_unread_check(config, reward),
        reward_counts=getattr(reward, "take_counts", dict),
        reward_failures=getattr(reward, "status", dict),
        close_reward=getattr(reward, "close", lambda: None),
        open_calls=lambda run, train_data: _open_calls(
            run, config, context, engine, checked | {"data.train": train_data}
        ),
        join_scores=late.joined if late is not None else None,
    )
    for key, dataset in checked.items():
        parts.check_prompts(config, dataset, key)
    return parts


def _open_calls(
    run: RunDirectory,
    config: Config,
    context: BackendContext,
    engine: InferenceEngine,
    datasets: Mapping[str, PromptDataset],
) -> AbstractContextManager[object]:
    """``datasets`` are those that the engine answers, by key."""
    if not engine.status().servers:
        return nullcontext()
    from headwater.backends.router.engine import RoutedServer, RouterEngine
    from headwater.backends.router.run_calls import RunCalls

    can = engine.capabilities
    needs = [Needs.of(config, can, dataset, key) for key, dataset in datasets.items()]

    def connect(url: str) -> RoutedServer:
        """With the checks that the servers of the recipe had when the run was started."""
        server = connect_server(context, url)
        joining, told = server.engine, replace(context.config, rollout=replace(context.config.rollout, servers=(url,)))
        try:
            if problems := missing_capabilities(told, joining.capabilities):
                raise ConfigError(problems)
            check_stop_tokens(config, joining)
            for each in needs:
                each.check(config, joining)
        except BaseException:
            joining.close()
            raise
        return server

    return RunCalls(run, engine, connect) if isinstance(engine, RouterEngine) else nullcontext()


def _code_check(config: Config, reward: object, toolbox: Toolbox | None) -> Callable[[Prompt], bool]:
    check: Callable[[Prompt], bool] | None = getattr(reward, "runs_code", None)
    if check is None or is_path(config.rollout.workflow) or (toolbox is not None and toolbox.runs_code):
        return lambda prompt: True
    return check


def _unread_check(config: Config, reward: object) -> Callable[[Prompt], Collection[str]]:
    check: Callable[[Prompt], Collection[str]] | None = getattr(reward, "unread_settings", None)
    return check if check is not None and not is_path(config.rollout.workflow) else lambda prompt: ()


def _prompt_check(config: Config, reward: object, toolbox: Toolbox | None) -> Callable[[Prompt], None]:
    """Reward managers may have a method ``check_row``, which finds a wrong signature before anything is generated.

    A custom workflow need not use the scorers, so they are then checked only if ``reward.function`` names one.
    """
    check_reward: Callable[[Prompt], None] | None = getattr(reward, "check_row", None)
    if is_path(config.rollout.workflow) and not config.reward.function:
        check_reward = None

    def check(prompt: Prompt) -> None:
        if check_reward is not None:
            check_reward(prompt)
        if toolbox is not None:
            toolbox.check_row(prompt)

    return check


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
        in_order=config.run.deterministic,
        holds_engine=not rollout.is_separate and config.cluster.kind == "local",
        max_rounds=config.algorithm.max_filter_rounds if _filters_groups(config) else None,
    )


def make_sampling(config: Config) -> tuple[SamplingParams, SamplingParams]:
    """The sampling settings of training and of evaluation. Both end replies alike."""
    rollout = config.rollout
    training = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        min_new_tokens=rollout.min_new_tokens,
        stop_token_ids=rollout.stop_token_ids,
        stop_strings=rollout.stop,
    )
    chosen = config.eval
    evaluation = replace(
        training,
        max_new_tokens=longest_evaluated(config),
        min_new_tokens=min(rollout.min_new_tokens, longest_evaluated(config)),
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
    )
    return training, evaluation


def longest_evaluated(config: Config) -> int:
    """The longest response of evaluation, in tokens."""
    return config.eval.max_new_tokens or config.rollout.max_new_tokens


def _filters_groups(config: Config) -> bool:
    return config.algorithm.filter_groups or bool(config.rollout.should_accept)


def _filters(config: Config) -> dict[DropKind, GroupFilter]:
    """What decides whether a complete group is trained on, in this order."""
    filters: dict[DropKind, GroupFilter] = {}
    if config.algorithm.filter_groups:
        filters[DropKind.FILTERED] = scores_differ
    if config.rollout.should_accept:
        filters[DropKind.REFUSED] = load_should_accept(config.rollout.should_accept)
    return filters


def describe(dataset: PromptDataset | None, kind: str, num_used: int = 0) -> str:
    """For example ``4096 training prompts``, and how many were left out because of their length.

    ``num_used`` is ``eval.num_prompts``; 0 means all.
    """
    if dataset is None:
        return f"no {kind} prompts"
    if 0 < num_used < len(dataset):
        return f"{num_used} of {len(dataset)} {kind} prompts (eval.num_prompts; 0 takes all)"
    count = num_left_out(dataset)
    left_out = f" ({count} over data.max_prompt_tokens left out)" if count else ""
    return f"{len(dataset)} {kind} prompts{left_out}"


def num_left_out(dataset: PromptDataset) -> int:
    """Prompts that are not used because they are too long."""
    return dataset.num_filtered if isinstance(dataset, MeasuredDataset) else 0
