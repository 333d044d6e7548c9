"""A device that has run out of memory: at which stage, what holds the most, and which settings need less, with what
each of them saves.

    with advised("load_learner", config, plan):     # an error about memory inside becomes one with advice
        ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from headwater.config.schema import Config
from headwater.core.disk import show_bytes
from headwater.core.errors import DeviceMemoryFull
from headwater.core.learner import LearnerStatus
from headwater.core.memory_plan import GIB, KV_CACHE, RELEASED, RESIDENT, MemoryPlan, Way
from headwater.models.device import resolve_device, resolve_dtype
from headwater.models.memory_sizes import LOGITS_CHUNK_BYTES, RunSizes, prompt_tokens_of_step
from headwater.trainer.memory_setup import Models, holders_of, planned
from headwater.trainer.memory_turns import releases_cache

_WEIGHT_BYTES = 4
_COPY_BYTES = 2
"""Of a weight in the type of the passes."""
_AVERAGES_BYTES = 8
"""AdamW's two averages of one trained weight."""
_WORK = {
    "wait": "generating responses",
    "evaluate": "evaluating",
    "experience": "computing log-probs and values",
    "train": "updating the policy",
    "publish": "sending the weights to the engine",
    "checkpoint": "saving a checkpoint",
    "offload": "moving the learner between the device and main memory",
    "load_engine": "loading the engine",
    "load_learner": "loading the learner",
    "warm_start": "training on supervised examples",
    "resume": "loading a checkpoint",
}
"""What the stages of a step do, and those before the first step, for the message."""
_GENERATING = ("wait", "evaluate", "load_engine")
_TRAINING = ("train", "warm_start", "load_learner", "resume")
_FROM_START = ("load_engine", "load_learner")
"""Stages in which a new run has done nothing yet that could be resumed."""
_NOT_HELD = {
    "load_engine": ("parameters", "gradients", "optimizer", "pictures"),
    "load_learner": ("gradients", "optimizer", "activations"),
    "resume": ("gradients", "activations"),
    "experience": ("gradients",),
    "publish": ("activations",),
    "checkpoint": ("activations",),
    "offload": ("activations",),
}
"""Holders that a stage has not yet, or no more."""
_NUM_HOLDERS = 5
NEW_RUN = "in a new run"
"""Marks settings that a resume refuses to change, because the checkpoint depends on them."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that a device or the machine has no more memory."""
    seen = set()
    while error is not None and id(error) not in seen:  # errors may name each other as their cause
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        text = str(error)
        if "CUDA out of memory" in text or "DefaultCPUAllocator: can't allocate memory" in text:
            return True
        error = error.__cause__
    return False


@dataclass(frozen=True)
class Known:
    """What is known about the memory of a run: the sizes of its models, and of the engine's KV cache if it exists, and
    what the learner has done."""

    models: Models
    cache_bytes: int = 0
    num_ranks: int = 1
    recorded_bytes: int = 0
    """Memory of the learner's CUDA graphs."""
    pass_tokens: int = 0
    """Tokens of the largest pass with gradients; 0 if there was none. Packs are evened out, so they are often much
    smaller than ``learner.max_tokens_per_microbatch`` allows, and half of that setting might change nothing."""
    forward_pass_tokens: int = 0
    """The same for passes without gradients."""

    @classmethod
    def of(
        cls,
        config: Config,
        settings: Callable[[], Mapping[str, Any]] = dict,
        learner: LearnerStatus | None = None,
    ) -> Known | None:
        """``settings`` returns those that the engine's status tells. None if the sizes cannot be read."""
        try:
            models = Models.read(config, config.model.path)
            cache_gib = float(settings().get("kv_cache_gib", 0.0))
        except Exception:  # noqa: BLE001  an error about memory must not be hidden by another one
            return None
        cache_bytes = int(cache_gib * GIB)
        if learner is None:
            return cls(models, cache_bytes)
        return cls(
            models,
            cache_bytes,
            learner.num_ranks,
            learner.recorded_bytes,
            learner.pass_tokens,
            learner.forward_pass_tokens,
        )

    def tokens(self, config: Config) -> int:
        """Of a pass with gradients."""
        most = config.learner.max_tokens_per_microbatch
        return min(self.pass_tokens, most) or most

    def forward_tokens(self, config: Config) -> int:
        """Of a pass without gradients."""
        most = config.learner.forward_tokens
        return min(self.forward_pass_tokens, most) or most

    def ways(self, config: Config, stage: str) -> dict[str, Way]:
        """Every holder as the settings alone have it, without a plan."""
        config = _learning(
            config,
            residency=("resident",),
            max_tokens_per_microbatch=self.tokens(config),
            max_tokens_per_forward_pass=self.forward_tokens(config),
        )
        sizes = self._of_rank(self.models.sizes(config))
        if stage == "experience":
            sizes = replace(sizes, activations=self.forward_bytes(config, config.learner.forward_tokens))
        ways = {each.tag: each.ways[0] for each in holders_of(config, sizes, can_discard=False)}
        in_training = 0 if releases_cache(config, None) else self.cache_bytes
        ways[KV_CACHE] = Way(RESIDENT, self.cache_bytes, in_training)
        ways["recorded_passes"] = Way(RESIDENT, self.recorded_bytes, self.recorded_bytes)
        if config.rollout.is_separate:
            ways = {tag: way for tag, way in ways.items() if tag not in ("weights", KV_CACHE, "graphs", "pictures")}
        return ways

    def forward_bytes(self, config: Config, num_tokens: int) -> int:
        """A pass of the policy without gradients."""
        item = resolve_dtype(config.model.dtype, config.model.device).itemsize
        return self.models.policy.forward_bytes(num_tokens, item, min(num_tokens, prompt_tokens_of_step(config)))

    def saved(self, config: Config, other: Config, part: Callable[[RunSizes], int]) -> int:
        """Bytes of a part that another config saves."""
        return max(0, part(self.models.sizes(config)) - part(self.models.sizes(other)))

    def _of_rank(self, sizes: RunSizes) -> RunSizes:
        """Ranks share the weights that are trained, their gradients and averages."""
        count = self.num_ranks
        return replace(
            sizes,
            parameters=sizes.parameters // count,
            gradients=sizes.gradients // count,
            optimizer=sizes.optimizer // count,
        )


@contextmanager
def advised(stage: str, config: Config, plan: MemoryPlan | None = None, *, is_resumed: bool = False) -> Iterator[None]:
    """A part of a run before its first step. If the device runs out of memory in it, the error names settings that need
    less."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error) or isinstance(error, DeviceMemoryFull):
            raise
        raise memory_full(error, stage, config, {}, plan, Known.of(config), is_resumed=is_resumed) from error


def memory_full(
    error: BaseException,
    stage: str,
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    plan: MemoryPlan | None = None,
    known: Known | None = None,
    *,
    is_resumed: bool = False,
) -> DeviceMemoryFull:
    """``shapes`` are those of the policy's weights. The ``plan`` of the run names the largest holders of memory, or
    what is ``known`` about its sizes."""
    ways = plan.holders if plan is not None else known.ways(config, stage) if known is not None else {}
    config = _as_planned(config, plan)
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    vocabulary = _vocabulary(shapes)
    if known is not None and not shapes:
        num_weights, vocabulary = known.models.policy.num_parameters, known.models.policy.vocab_size
    cause = str(error).partition("\n")[0][:300]
    lines = "\n".join(f"  - {line}" for line in remedies(stage, config, num_weights, vocabulary, known))
    starts = stage in _FROM_START and not is_resumed
    then = "start again" if starts else "resume (not those for a new run)"
    return DeviceMemoryFull(
        f"out of memory while {_WORK.get(stage, stage)} ({cause}). The policy has {num_weights / 1e6:.0f} million "
        f"weights. {_largest(stage, ways, plan, known)}These settings need less; change one, then {then}:\n{lines}"
    )


def _as_planned(config: Config, plan: MemoryPlan | None) -> Config:
    """The config with what the plan does already, so that nothing of it is advised."""
    if plan is None:
        return config
    config = planned(config, plan)
    if plan.ways[KV_CACHE] == RELEASED:
        # The learner may stay where it is, but the cache is gone during training, as with this setting.
        return replace(config, learner=replace(config.learner, offload_during_rollout=True))
    return config


def _largest(stage: str, ways: Mapping[str, Way], plan: MemoryPlan | None, known: Known | None) -> str:
    """A sentence about the holders of memory in the phase of a stage, the largest first."""
    held = {tag: way for tag, way in ways.items() if tag not in _NOT_HELD.get(stage, ())}
    sizes = {tag: way.generate if stage in _GENERATING else way.train for tag, way in held.items()}
    named = [tag for tag in sorted(sizes, key=lambda tag: -sizes[tag])[:_NUM_HOLDERS] if sizes[tag]]
    if not named:
        return ""
    parts = ", ".join(f"{tag.replace('_', ' ')} {show_bytes(sizes[tag])}" for tag in named)
    if plan is not None:
        return f"The plan of the run counts, of {show_bytes(plan.budget.device)} that were free at its start: {parts}. "
    where = f" on each of {known.num_ranks} ranks" if known is not None and known.num_ranks > 1 else ""
    estimate = " (activations are an estimate)" if "activations" in named else ""
    return f"By their sizes, the largest holders{where} are: {parts}{estimate}. "


def _vocabulary(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return max((shape[0] for shape in shapes.values() if len(shape) == 2), default=0)


def remedies(
    stage: str, config: Config, num_weights: int, vocabulary: int, known: Known | None = None
) -> Iterator[str]:
    """Settings that reduce the memory of a stage, those that cost the least speed first."""
    if stage == "experience":
        yield from _of_forward(config, vocabulary, known)
    if stage in (*_GENERATING, "offload"):
        yield from _of_generation(config, known)
        if stage != "load_engine":  # there is no learner yet
            yield from _of_turns(config, num_weights)
            if known is not None and known.recorded_bytes:
                yield _no_graphs(known.recorded_bytes)
    if stage in _TRAINING:
        yield from _of_update(config, num_weights, vocabulary, known)
    if stage == "checkpoint":
        yield from _of_checkpoint(config, num_weights)
    if stage in (*_TRAINING, "experience", "publish") and _shares_device(config):
        turns = "; learner.offload_during_rollout=true frees all of it during training"
        half = f" ({_half_cache(known)})" if known is not None and known.cache_bytes else ""
        yield f"{_smaller_cache(config)}: frees half of the KV cache{half}{turns if _can_take_turns(config) else ''}"
    if stage in (*_TRAINING, "experience", "publish") and config.lora.rank == 0:
        saved = (_WEIGHT_BYTES + _AVERAGES_BYTES) * num_weights
        yield (
            f"lora.rank=16, {NEW_RUN}: trains adapters only, which saves about {show_bytes(saved)} of gradients and "
            "averages"
        )


def _half_cache(known: Known) -> str:
    return show_bytes(known.cache_bytes // 2)


def _shares_device(config: Config) -> bool:
    """Whether the KV cache takes memory that the learner could use."""
    return not config.rollout.is_separate and not config.learner.offload_during_rollout


def _can_take_turns(config: Config) -> bool:
    """``learner.offload_during_rollout`` is refused if responses are generated during training."""
    return _shares_device(config) and config.rollout.max_staleness == 0


def _smaller_cache(config: Config) -> str:
    """The setting that halves the KV cache. ``engine.memory_fraction`` is not read if the size is given."""
    engine = config.engine
    if engine.kv_cache_gib:
        return f"engine.kv_cache_gib={engine.kv_cache_gib / 2:.3g} (now {engine.kv_cache_gib:.3g})"
    is_alone = config.rollout.is_separate and _uses_gpu(config, config.rollout.device)
    fraction = engine.chosen_memory_fraction(has_gpu_alone=is_alone)
    return f"engine.memory_fraction={fraction / 2:g} (now {fraction:g}, a share of the free memory)"


def _uses_gpu(config: Config, device: str = "auto") -> bool:
    """Whether the learner, or a server on ``device``, has a GPU. One in a cluster has one as a rule."""
    return (
        config.cluster.kind != "local"
        or resolve_device(config.model.device if device == "auto" else device).type == "cuda"
    )


def _learning(config: Config, **values: object) -> Config:
    return replace(config, learner=replace(config.learner, **values))  # type: ignore[arg-type]


def _about(known: Known | None, config: Config, other: Config, part: Callable[[RunSizes], int]) -> str:
    """What another config saves, as the end of a line, or nothing if that is not known."""
    saved = known.saved(config, other, part) if known is not None else 0
    return f"; saves about {show_bytes(saved)} by estimate" if saved else ""


def _now(setting: int, tokens: int) -> str:
    """The value of a setting, and the tokens of the passes if they were fewer."""
    return f"now {setting}" if tokens == setting else f"now {setting}, and passes had up to {tokens} tokens"


def _of_update(config: Config, num_weights: int, vocabulary: int, known: Known | None) -> Iterator[str]:
    learner = config.learner
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    most = learner.max_tokens_per_microbatch
    tokens = most if known is None else known.tokens(config)
    fewer = max(longest, tokens // 2)
    now, other = (_learning(config, max_tokens_per_microbatch=each) for each in (tokens, fewer))
    held = known.recorded_bytes if known is not None else 0
    has_graphs = learner.cuda_graphs == "auto" and _uses_gpu(config)
    graphs_first = known is not None and held > known.saved(now, other, lambda sizes: sizes.activations)
    if has_graphs and graphs_first:
        yield _no_graphs(held)
    if fewer < tokens:
        saved = (tokens - fewer) * vocabulary * _WEIGHT_BYTES
        yield (
            f"learner.max_tokens_per_microbatch={fewer} ({_now(most, tokens)}): activations shrink to "
            f"{100 * fewer / tokens:.0f}%, and the logits of a pass by up to {show_bytes(saved)}; the gradient is equal"
            f"{_about(known, now, other, lambda sizes: sizes.activations)}"
        )
    if not learner.checkpoint_activations:
        other = _learning(now, checkpoint_activations=True)
        yield (
            "learner.checkpoint_activations=true: keeps the input of each layer instead of all its activations, often "
            f"a tenth of them, for a third more work{_about(known, now, other, lambda sizes: sizes.activations)}"
        )
    kept = min(learner.kept_logits_gib * 2**30, tokens * vocabulary * _WEIGHT_BYTES)
    # One chunk of logits exists in any case.
    if (saved := int(kept) - (LOGITS_CHUNK_BYTES if _uses_gpu(config) else 0)) >= 2**30:
        yield (
            f"learner.kept_logits_gib=0 (now {learner.kept_logits_gib:g}): computes logits again in the backward pass, "
            f"which saves up to {show_bytes(saved)} and takes a few per cent longer"
        )
    if learner.keep_logits_if_free and _uses_gpu(config):
        yield (
            "learner.keep_logits_if_free=false: keeps no further logits, which otherwise happens while a tenth of the "
            "GPU is free; takes a few per cent longer"
        )
    if learner.convert_at_once and config.lora.rank == 0 and _uses_gpu(config):
        yield (
            "learner.convert_at_once=false: with a single rank, converts one layer at a time instead of all weights, "
            f"which saves up to {show_bytes(_COPY_BYTES * num_weights)} and takes longer"
        )
    if has_graphs and not graphs_first:
        yield _no_graphs(held)
    if not learner.offload_optimizer and config.lora.rank == 0 and _uses_gpu(config):
        saved = _AVERAGES_BYTES * num_weights
        yield f"learner.offload_optimizer=true: keeps AdamW's averages in main memory, which saves {show_bytes(saved)}"
    if known is not None and known.models.policy.tower is not None:
        yield from _of_pictures(config, known)
    if config.critic.enabled:
        total = (2 * _WEIGHT_BYTES + _AVERAGES_BYTES) * num_weights
        yield (
            f"critic.path=SMALLER_MODEL, or an advantage without critic such as grpo, {NEW_RUN}: saves up to "
            f"{show_bytes(total)}"
        )


def _no_graphs(held: int) -> str:
    """The setting that does without the ``held`` bytes of the learner's CUDA graphs, or with 0 of those to come."""
    kept = f"hold {show_bytes(held)} now" if held else "of each model keep up to a tenth of the GPU's memory"
    return f"learner.cuda_graphs=off: does not record the passes of small packs; the graphs {kept}"


def _of_pictures(config: Config, known: Known) -> Iterator[str]:
    """For training a vision model."""
    fewer = max(1, config.data.max_image_pixels // 2)
    yield (
        f"data.max_image_pixels={fewer} (now {config.data.max_image_pixels}): larger pictures are scaled down and have "
        "fewer tokens"
    )
    if not config.lora.rank and "vision" not in config.learner.freeze:
        other = _learning(config, freeze=("vision",))
        saved = known.saved(config, other, lambda sizes: sizes.gradients + sizes.optimizer)
        about = _about(known, config, other, lambda sizes: sizes.activations)
        yield (
            f"learner.freeze=[vision], {NEW_RUN}: does not train the vision tower, which saves {show_bytes(saved)} of "
            f"gradients and averages{about}"
        )


def _of_checkpoint(config: Config, num_weights: int) -> Iterator[str]:
    """A checkpoint that is written in the background is first copied, to main memory."""
    averages = 0 if config.lora.rank or not config.trainer.checkpoint_optimizer else _AVERAGES_BYTES * num_weights
    if config.trainer.checkpoint_in_background:
        saved = show_bytes(_WEIGHT_BYTES * num_weights + averages)
        yield f"trainer.checkpoint_in_background=false: needs no copy in main memory, which saves up to {saved}"
    if averages:
        yield (
            f"trainer.checkpoint_optimizer=false: leaves out AdamW's averages, {show_bytes(averages)}; a resumed run "
            "does not continue exactly"
        )


def _of_forward(config: Config, vocabulary: int, known: Known | None) -> Iterator[str]:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    most = config.learner.forward_tokens
    tokens = most if known is None else known.forward_tokens(config)
    if (fewer := max(longest, tokens // 2)) < tokens:
        saved = (tokens - fewer) * vocabulary * _WEIGHT_BYTES
        about = ""
        if known is not None:
            less = known.forward_bytes(config, tokens) - known.forward_bytes(config, fewer)
            about = f"; saves about {show_bytes(less)} by estimate"
        yield (
            f"learner.max_tokens_per_forward_pass={fewer} ({_now(most, tokens)}): a pass needs "
            f"{100 * fewer / tokens:.0f}% of its memory, and its logits up to {show_bytes(saved)} less{about}"
        )


def _of_generation(config: Config, known: Known | None) -> Iterator[str]:
    engine = config.engine
    on_gpu = _uses_gpu(config, config.rollout.device if config.rollout.is_separate else "auto")
    half = f", which frees {_half_cache(known)}" if known is not None and known.cache_bytes else ""
    yield f"{_smaller_cache(config)}: halves the KV cache{half}"
    sequences = engine.chosen_sequences(on_gpu=on_gpu)
    fewer = replace(config, engine=replace(engine, max_sequences=max(1, sequences // 2)))
    about = _about(known, config, fewer, lambda sizes: sizes.graphs + sizes.prefill)
    if about or known is None:  # fewer sequences than that may be in flight
        half = f"engine.max_sequences={max(1, sequences // 2)} (now {sequences})"
        yield f"{half}: halves the memory of a decode step{about}"
    prefill = engine.chosen_prefill_tokens(on_gpu=on_gpu)
    now = replace(config, engine=replace(engine, max_prefill_tokens=prefill))
    fewer = replace(config, engine=replace(engine, max_prefill_tokens=max(1, prefill // 2)))
    about = _about(known, now, fewer, lambda sizes: sizes.prefill)
    lower = f"engine.max_prefill_tokens={max(1, prefill // 2)} (now {prefill})"
    yield f"{lower}: halves the memory of a prefill pass{about}"


def _of_turns(config: Config, num_weights: int) -> Iterator[str]:
    if _uses_gpu(config) and _can_take_turns(config):
        saved = (_WEIGHT_BYTES + _AVERAGES_BYTES) * num_weights
        yield (
            f"learner.offload_during_rollout=true: moves the learner to main memory during generation, which frees "
            f"{show_bytes(saved)}"
        )
