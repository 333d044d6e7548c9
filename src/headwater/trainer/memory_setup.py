"""The memory plan of a run: what its config, its models and its GPU say about ``core.memory_plan``."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch

from headwater.config.schema import Config
from headwater.config.server_checks import backend_traits
from headwater.core.disk import show_bytes
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.memory_plan import (
    GIB,
    KV_CACHE,
    MOVED,
    RELEASED,
    RESIDENT,
    STREAMED,
    Budget,
    Cache,
    Holder,
    MemoryPlan,
    NoPlan,
    Way,
    make_plan,
)
from headwater.models.device import available_ram, free_bytes, resolve_device
from headwater.models.memory_sizes import GRAPHS_SHARE, ModelSize, RunSizes
from headwater.models.virtual_memory import is_supported

logger = logging.getLogger(__name__)

_RESERVE, _LEAST_RESERVE = 0.06, GIB
"""Part of the GPU that a plan leaves free, and the least of it: estimates are not exact, and memory is fragmented."""
_HOST_SHARE = 0.85
"""Of the free main memory, the most that copies may take."""
_PAGE_TOKENS = 64
_MAY_LEAVE: tuple[Literal["kv_cache", "weights", "parameters", "optimizer"], ...]
_MAY_LEAVE = ("kv_cache", "weights", "parameters", "optimizer")


@dataclass(frozen=True)
class Models:
    """The sizes of the models of a run."""

    policy: ModelSize
    others: dict[str, ModelSize]
    """The critic, the reference and the reward model, by their section of the config."""

    @classmethod
    def read(cls, config: Config, model_path: str) -> Models:
        policy = ModelSize.read(model_path)
        algorithm, others = config.algorithm, {}
        if config.critic.enabled:
            others["critic"] = ModelSize.read(config.critic.path, "critic.path") if config.critic.path else policy
        if (algorithm.kl_in_loss > 0 or algorithm.kl_in_reward > 0) and (config.reference.path or not config.lora.rank):
            path = config.reference.path
            others["reference"] = ModelSize.read(path, "reference.path") if path else policy
        if config.reward.model:
            others["reward"] = ModelSize.read(config.reward.model, "reward.model")
        return cls(policy, others)

    def sizes(self, config: Config) -> RunSizes:
        prefill = config.engine.chosen_prefill_tokens(on_gpu=True)
        return RunSizes.of(config, self.policy, self.others, num_in_flight(config), prefill)


def shares_gpu(config: Config, num_ranks: int = 1) -> bool:
    """Whether an engine of ours and a learner of one process share a GPU."""
    return (
        config.cluster.kind == "local"
        and num_ranks == 1
        and not config.rollout.is_separate
        and backend_traits(config).is_planned
        and not config.eval.only
        and resolve_device(config.model.device).type == "cuda"
    )


def is_planned(config: Config, num_ranks: int = 1) -> bool:
    """Whether ``learner.residency`` asks for a plan, and there is something to plan."""
    return shares_gpu(config, num_ranks) and config.learner.residency != (RESIDENT,)


def plan_run(config: Config, model_path: str, num_ranks: int = 1) -> MemoryPlan | None:
    """The plan, before anything is loaded. None where none is made. Raises ``ConfigError`` if nothing fits.

    A run without a plan is refused as well if it cannot fit as it is.
    """
    if not is_planned(config, num_ranks):
        if shares_gpu(config, num_ranks):
            _check_unplanned(config, model_path)
        _check_nothing_listed(config, num_ranks)
        return None
    device = resolve_device(config.model.device)
    try:
        models = Models.read(config, model_path)
    except HeadwaterError:
        raise
    except Exception as error:  # noqa: BLE001  architectures raise arbitrary errors for what they do not expect
        logger.warning("no memory plan, because the sizes of the models are not known: %s", error)
        return None
    budget = budget_of(config, free_bytes(device), available_ram())
    return plan_memory(config, models, budget, can_discard=is_supported(device))


def _check_nothing_listed(config: Config, num_ranks: int) -> None:
    """What ``learner.residency`` names would stay on the GPUs of several ranks, without a word."""
    if set(config.learner.residency) <= {"auto", RESIDENT} or (num_ranks == 1 and config.cluster.kind == "local"):
        return
    named = ", ".join(config.learner.residency)
    raise ConfigError(
        [
            f"learner.residency = [{named}]: a plan is made only for a learner of one process, and this run has "
            "several ranks or is on a Ray cluster; use learner.offload_optimizer=true or "
            "learner.offload_during_rollout=true"
        ]
    )


def _check_unplanned(config: Config, model_path: str) -> None:
    device = resolve_device(config.model.device)
    try:
        models = Models.read(config, model_path)
    except Exception:  # noqa: BLE001  a model that cannot be read is refused where it is loaded
        return

    def check() -> None:
        budget = budget_of(config, free_bytes(device), available_ram())
        check_fits(config, models, budget, can_discard=is_supported(device))

    try:
        check()
    except ConfigError:
        # What an earlier run in this process has left must not count.
        gc.collect()
        torch.cuda.empty_cache()
        check()


def check_fits(config: Config, models: Models, budget: Budget, *, can_discard: bool) -> None:
    """Raise ``ConfigError`` with numbers if a run without a plan needs more memory than there is, for certain: without
    activations, and without the copies in main memory that two settings ask for."""
    sizes = models.sizes(config)
    certain = sizes.certain
    size = _least_unplanned(config, models, sizes, budget)
    cache = Cache(size, size, size, cache_of(config, sizes, budget).ways)
    tight = replace(budget, reserve=0, host=1 << 62)
    try:
        make_plan(holders_of(config, certain, can_discard=False), tight, cache)
    except NoPlan as error:
        plan = _advised_plan(config, models, budget, can_discard=can_discard)
        less = f"engine.kv_cache_gib={size / 2 / GIB:.3g}: saves {show_bytes(size / 2)}" if size else ""
        # What reduces estimates alone would not help.
        advice = [each for each in (plan, *savings(config, models, certain_only=True), less) if each]
        raise ConfigError([_refusal(config, error, advice)]) from error


def _least_unplanned(config: Config, models: Models, sizes: RunSizes, budget: Budget) -> int:
    """Bytes that the KV cache has at the least if there is no plan (``engine/kv_cache.py`` chooses)."""
    engine, policy = config.engine, models.policy
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    rows = engine.chosen_sequences(on_gpu=True)
    if engine.kv_cache_gib:
        return min(int(engine.kv_cache_gib * GIB), rows * longest * sizes.kv_token)
    prefill = engine.chosen_prefill_tokens(on_gpu=True)
    item = sizes.weights // policy.num_parameters
    left = budget.device - sizes.weights - policy.prefill_bytes(prefill, rows, item) - GIB
    left -= sizes.pictures + sizes.tower
    share = engine.chosen_memory_fraction(has_gpu_alone=False) * max(0, left)
    return min(int(share), rows * longest * sizes.kv_token)


def _advised_plan(config: Config, models: Models, budget: Budget, *, can_discard: bool) -> str:
    """A line about the plan that ``learner.residency=[auto]`` would make, if one fits."""
    config = replace(config, learner=replace(config.learner, residency=("auto",)))
    try:
        plan = plan_memory(config, models, budget, can_discard=can_discard)
    except ConfigError:
        return ""
    if not plan.fits:
        return ""
    moved = f"{show_bytes(plan.moved)} move in every step" if plan.moved else "nothing is copied"
    return f"learner.residency=[auto] (releases what is not needed; {moved}): needs {show_bytes(plan.peak)}"


def budget_of(config: Config, device_bytes: int, host_bytes: int) -> Budget:
    return Budget(
        device=device_bytes,
        host=int(_HOST_SHARE * host_bytes),
        reserve=max(_LEAST_RESERVE, int(_RESERVE * device_bytes)),
        at_once=config.rollout.max_staleness > 0,
    )


def plan_memory(config: Config, models: Models, budget: Budget, *, can_discard: bool) -> MemoryPlan:
    """The plan for these sizes. Raises ``ConfigError`` with numbers if nothing fits."""
    sizes = models.sizes(config)

    def plan(sizes: RunSizes, budget: Budget) -> MemoryPlan:
        holders = holders_of(config, sizes, can_discard=can_discard)
        # Memory that the cache could use, but does not need, is better used for recording passes.
        spare = math.ceil(GRAPHS_SHARE * budget.device) if config.learner.cuda_graphs == "auto" else 0
        return make_plan(holders, budget, cache_of(config, sizes, budget), is_allowed=_leave_together, spare=spare)

    try:
        best = plan(sizes, budget)
    except NoPlan:
        return _plan_of_certain(config, models, sizes, budget, can_discard=can_discard)
    with suppress(NoPlan):  # converting all weights at once is faster, but nothing leaves the GPU for it
        whole = plan(replace(sizes, activations=sizes.activations + sizes.copies), budget)
        if sizes.copies and whole.ways == best.ways and whole.kv_cache >= min(best.kv_cache, _needed(config, sizes)):
            return replace(whole, converts_at_once=True)
    return best


def _plan_of_certain(
    config: Config, models: Models, sizes: RunSizes, budget: Budget, *, can_discard: bool
) -> MemoryPlan:
    """Of the plans that fit without anything that is only estimated, the one that moves the least.

    Estimates must not refuse what may work, nor make it slow: they are for the longest responses that are possible.
    """
    tight = replace(budget, reserve=0, host=int(budget.host / _HOST_SHARE))
    cache = cache_of(config, sizes, budget)
    cache = replace(cache, wanted=cache.needed)
    holders = holders_of(config, sizes.certain, can_discard=can_discard)
    try:
        chosen = make_plan(holders, tight, cache, is_allowed=_leave_together, is_tight=True)
    except NoPlan as error:
        if error.least.ways["optimizer"] == STREAMED:  # by the plan, or because the config says so
            config = replace(config, learner=replace(config.learner, offload_optimizer=True))
        raise ConfigError([_refusal(config, error, savings(config, models))]) from error
    # What only the estimates have stays.
    estimated = {
        holder.tag: next(way for way in holder.ways if way.name == chosen.ways.get(holder.tag, RESIDENT))
        for holder in holders_of(config, sizes, can_discard=can_discard)
    }
    return replace(chosen, holders={**estimated, KV_CACHE: chosen.holders[KV_CACHE]}, budget=budget)


def _leave_together(plan: MemoryPlan) -> bool:
    """A learner that leaves takes its averages along, unless they are in main memory anyway."""
    return plan.ways["parameters"] != MOVED or plan.ways["optimizer"] != RESIDENT


def holders_of(config: Config, sizes: RunSizes, *, can_discard: bool) -> list[Holder]:
    """Everything but the KV cache, with the ways that the config allows.

    ``can_discard`` says that the engine has fixed addresses: its weights can be released without a copy, because the
    next publication brings all of them.
    """
    may = _Allowed(config)
    weights = [Way(RESIDENT, sizes.weights, sizes.weights)]
    if can_discard and config.rollout.publish == "full":
        weights.append(Way(RELEASED, sizes.weights, 0))
    parameters = [
        Way(RESIDENT, sizes.parameters, sizes.parameters),
        Way(MOVED, 0, sizes.parameters, moved=2 * sizes.parameters, host=sizes.parameters),
    ]
    averages = sizes.optimizer
    optimizer = [
        Way(RESIDENT, averages, averages),
        Way(STREAMED, 0, sizes.streamed, moved=2 * averages, host=averages),
        Way(MOVED, 0, averages, moved=2 * averages, host=averages),
    ]
    kept, generating = sizes.pictures, sizes.pictures + sizes.tower
    pictures = [Holder("pictures", (Way(RESIDENT, generating, kept),))] if generating else []
    return [
        Holder("weights", may.ways("weights", weights)),
        Holder("parameters", may.ways("parameters", parameters)),
        Holder("optimizer", may.ways("optimizer", optimizer)),
        Holder("gradients", (Way(RESIDENT, 0, sizes.gradients),)),
        Holder("activations", (Way(RESIDENT, sizes.prefill, sizes.activations),)),
        Holder("graphs", (Way(RESIDENT, sizes.graphs, sizes.graphs),)),
        *pictures,
    ]


@dataclass(frozen=True)
class _Allowed:
    """Which ways the settings leave to the plan."""

    config: Config

    def ways(self, tag: str, ways: Sequence[Way]) -> tuple[Way, ...]:
        wanted = self.names(tag)
        return tuple(way for way in ways if way.name in wanted) or (ways[0],)

    def names(self, tag: str) -> set[str]:
        learner = self.config.learner
        takes_turns = self.config.rollout.max_staleness == 0
        if tag == "optimizer" and learner.offload_optimizer:
            return {STREAMED}
        if learner.offload_during_rollout and tag in ("parameters", "optimizer"):
            return {MOVED}
        if learner.offload_during_rollout and tag == "kv_cache":
            return {RELEASED}
        away = {"weights": RELEASED, "kv_cache": RELEASED, "parameters": MOVED, "optimizer": STREAMED}[tag]
        if tag in learner.residency:
            return {away}
        if tag == "optimizer" and "parameters" in learner.residency:
            return {MOVED}  # a learner that leaves takes its averages along
        if learner.residency == ("auto",) and (takes_turns or away == STREAMED):
            return {RESIDENT, away}
        return {RESIDENT}


def num_in_flight(config: Config) -> int:
    """Responses that the engine generates at the same time."""
    groups = config.rollout.max_concurrent_groups or config.trainer.num_prompts_per_step * (
        1 + config.rollout.max_staleness
    )
    return min(config.engine.chosen_sequences(on_gpu=True), groups * config.rollout.num_samples_per_prompt)


def cache_of(config: Config, sizes: RunSizes, budget: Budget) -> Cache:
    """The KV cache that the run can use, and the one it cannot do without."""
    ways = tuple(sorted(_Allowed(config).names("kv_cache"), key=[RESIDENT, RELEASED].index))
    settings = config.engine
    if settings.kv_cache_gib:
        given = int(settings.kv_cache_gib * GIB)
        return Cache(given, given, given, ways)
    engine = sizes.weights + sizes.prefill + sizes.graphs + sizes.pictures + sizes.tower
    left = max(0, budget.device - engine)
    share = int(settings.chosen_memory_fraction(has_gpu_alone=False) * left)  # what the engine takes without a plan
    if settings.memory_fraction:
        return Cache(share, share, share, ways)
    one = sizes.kv_token * _PAGE_TOKENS * (_pages(config) + 2)
    usual = max(one, share)
    return Cache(min(max(one, _needed(config, sizes)), usual), one, usual, ways)


def _pages(config: Config) -> int:
    """Of the longest sequence."""
    return -(-(config.data.max_prompt_tokens + config.rollout.max_new_tokens) // _PAGE_TOKENS) + 1


def _needed(config: Config, sizes: RunSizes) -> int:
    """Bytes of the cache with which all responses in flight are generated at once."""
    return sizes.kv_token * _PAGE_TOKENS * _pages(config) * num_in_flight(config)


def planned(config: Config, plan: MemoryPlan | None) -> Config:
    """The config for engine and learner, with what the plan has decided."""
    if plan is None:
        return config
    engine, learner = config.engine, config.learner
    if not engine.kv_cache_gib and not engine.memory_fraction:
        engine = replace(engine, kv_cache_gib=plan.kv_cache / GIB)
    if RELEASED in (plan.ways["weights"], plan.ways["kv_cache"]):
        engine = replace(engine, keep_addresses=True)
    if plan.ways["optimizer"] == STREAMED:
        learner = replace(learner, offload_optimizer=True)
    leaving = tuple(tag for tag in _MAY_LEAVE if plan.ways[tag] != RESIDENT)
    learner = replace(
        learner,
        residency=leaving or ("resident",),
        convert_at_once=learner.convert_at_once and plan.converts_at_once,
    )
    if not _has_room_for_graphs(plan):
        learner = replace(learner, cuda_graphs="off")
    return replace(config, engine=engine, learner=learner)


def _has_room_for_graphs(plan: MemoryPlan) -> bool:
    """Whether the learner can record its passes: parameters keep their addresses, and there is memory to spare."""
    device = plan.budget.device
    return plan.ways["parameters"] == RESIDENT and plan.peak + plan.budget.reserve + GRAPHS_SHARE * device <= device


def describe_plan(plan: MemoryPlan) -> str:
    """What a run prints about its plan when it starts."""
    text = f"Memory of the GPU:\n{plan.table()}"
    if plan.fits:
        return text
    needed, free = show_bytes(plan.peak), show_bytes(plan.budget.device)
    return (
        f"{text}\nBy estimate the run needs {needed} of the {free} that are free, and may run out of memory. "
        "learner.checkpoint_activations=true and a smaller learner.max_tokens_per_microbatch need less."
    )


def _refusal(config: Config, error: NoPlan, advice: Iterable[str]) -> str:
    least = error.least
    holders = sorted(least.holders.items(), key=lambda each: -max(each[1].generate, each[1].train))
    largest = ", ".join(f"{tag} {show_bytes(max(way.generate, way.train))}" for tag, way in holders[:4])
    lines = "".join(f"\n  - {line}" for line in advice)
    if least.host > least.budget.host:
        usable = show_bytes(least.budget.host)
        what = f"copies in main memory need {show_bytes(least.host)}, and {usable} of it can be used"
    else:
        phase = "training" if least.train >= least.generate else "generation"
        phase = "generation and training at the same time" if least.budget.at_once else phase
        what = (
            f"{phase} needs at least {show_bytes(least.peak)} of GPU memory, and {show_bytes(least.budget.device)} are "
            f"free: {show_bytes(error.missing)} are missing"
        )
    residency = ", ".join(config.learner.residency)
    return f"learner.residency = {residency}: {what}. The largest parts are {largest}. These settings need less:{lines}"


def savings(config: Config, models: Models, *, certain_only: bool = False) -> Iterator[str]:
    """Settings that reduce the memory of a run, each with the bytes it saves at the peak of training.

    With ``certain_only``, activations do not count, because they are an estimate.
    """

    def num_bytes(config: Config) -> int:
        sizes = models.sizes(config)
        return _trained_bytes(config, replace(sizes, activations=0) if certain_only else sizes)

    for text, change in _changes(config, has_tower=models.policy.tower is not None):
        saved = num_bytes(config) - num_bytes(change(config))
        if saved > 0:
            yield f"{text}: saves {show_bytes(saved)}"


def _trained_bytes(config: Config, sizes: RunSizes) -> int:
    optimizer = sizes.streamed if config.learner.offload_optimizer else sizes.optimizer
    return sizes.parameters + sizes.gradients + sizes.activations + optimizer


def _changes(config: Config, *, has_tower: bool) -> Iterator[tuple[str, Callable[[Config], Config]]]:
    learner = config.learner

    def learning(**values: object) -> Callable[[Config], Config]:
        return lambda each: replace(each, learner=replace(each.learner, **values))  # type: ignore[arg-type]

    if not learner.checkpoint_activations:
        yield "learner.checkpoint_activations=true", learning(checkpoint_activations=True)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    fewer = max(longest, learner.max_tokens_per_microbatch // 2)
    if fewer < learner.max_tokens_per_microbatch:
        tokens = f"learner.max_tokens_per_microbatch={fewer} (now {learner.max_tokens_per_microbatch})"
        yield tokens, learning(max_tokens_per_microbatch=fewer)
    if not learner.offload_optimizer:
        yield "learner.offload_optimizer=true", learning(offload_optimizer=True)
    if has_tower and not config.lora.rank and "vision" not in learner.freeze:
        yield "learner.freeze=[vision] (does not train the vision tower)", learning(freeze=("vision",))
    if not config.lora.rank:
        yield "lora.rank=16 (trains adapters)", lambda each: replace(each, lora=replace(each.lora, rank=16))
