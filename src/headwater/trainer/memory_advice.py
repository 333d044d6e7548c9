"""A device that has run out of memory: at which stage, and which settings need less, with what each of them saves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from headwater.config.schema import Config
from headwater.core.disk import show_bytes
from headwater.core.errors import DeviceMemoryFull
from headwater.core.memory_plan import KV_CACHE, RELEASED, MemoryPlan
from headwater.engine.engine import CPU_PREFILL_TOKENS, CPU_SEQUENCES, GPU_PREFILL_TOKENS, GPU_SEQUENCES
from headwater.engine.kv_cache import SERVER_FRACTION, SHARED_FRACTION
from headwater.models.device import resolve_device
from headwater.trainer.memory_setup import planned

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
}
"""What the stages of a step do, for the message."""
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


def memory_full(
    error: BaseException,
    stage: str,
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    plan: MemoryPlan | None = None,
) -> DeviceMemoryFull:
    """``shapes`` are those of the policy's weights. The ``plan`` of the run names the largest holders of memory."""
    config = _as_planned(config, plan)
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    cause = str(error).partition("\n")[0][:300]
    lines = "\n".join(f"  - {line}" for line in remedies(stage, config, num_weights, _vocabulary(shapes)))
    return DeviceMemoryFull(
        f"out of memory while {_WORK.get(stage, stage)} ({cause}). The policy has {num_weights / 1e6:.0f} million "
        f"weights. {_largest(stage, plan)}These settings need less; change one, then resume (not those for a new "
        f"run):\n{lines}"
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


def _largest(stage: str, plan: MemoryPlan | None) -> str:
    """A sentence about the holders of memory in the phase of a stage, the largest first."""
    if plan is None:
        return ""
    generates = stage in ("wait", "evaluate")
    sizes = {tag: way.generate if generates else way.train for tag, way in plan.holders.items()}
    named = sorted(sizes, key=lambda tag: -sizes[tag])[:_NUM_HOLDERS]
    parts = ", ".join(f"{tag.replace('_', ' ')} {show_bytes(sizes[tag])}" for tag in named if sizes[tag])
    return f"The plan of the run counts, of {show_bytes(plan.budget.device)} that were free at its start: {parts}. "


def _vocabulary(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return max((shape[0] for shape in shapes.values() if len(shape) == 2), default=0)


def remedies(stage: str, config: Config, num_weights: int, vocabulary: int) -> Iterator[str]:
    """Settings that reduce the memory of a stage, those that cost the least speed first."""
    if stage in ("experience", "evaluate", "wait", "offload"):
        yield from _of_forward(config, vocabulary) if stage == "experience" else _of_generation(config, num_weights)
    if stage == "train":
        yield from _of_update(config, num_weights, vocabulary)
    if stage in ("train", "experience") and _shares_device(config):
        turns = "; learner.offload_during_rollout=true frees all of it during training"
        yield f"{_smaller_cache(config)}: frees half of the KV cache{turns if _can_take_turns(config) else ''}"
    if stage in ("train", "experience", "publish") and config.lora.rank == 0:
        saved = (_WEIGHT_BYTES + _AVERAGES_BYTES) * num_weights
        yield (
            f"lora.rank=16, {NEW_RUN}: trains adapters only, which saves about {show_bytes(saved)} of gradients and "
            "averages"
        )


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
    fraction = engine.memory_fraction or (SERVER_FRACTION if is_alone else SHARED_FRACTION)
    return f"engine.memory_fraction={fraction / 2:g} (now {fraction:g}, a share of the free memory)"


def _uses_gpu(config: Config, device: str = "auto") -> bool:
    """Whether the learner, or a server on ``device``, has a GPU. One in a cluster has one as a rule."""
    return (
        config.cluster.kind != "local"
        or resolve_device(config.model.device if device == "auto" else device).type == "cuda"
    )


def _of_update(config: Config, num_weights: int, vocabulary: int) -> Iterator[str]:
    learner = config.learner
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = learner.max_tokens_per_microbatch
    if (fewer := max(longest, tokens // 2)) < tokens:
        saved = (tokens - fewer) * vocabulary * _WEIGHT_BYTES
        yield (
            f"learner.max_tokens_per_microbatch={fewer} (now {tokens}): activations shrink to "
            f"{100 * fewer / tokens:.0f}%, and the logits of a pass by up to {show_bytes(saved)}; the gradient is equal"
        )
    if not learner.checkpoint_activations:
        yield (
            "learner.checkpoint_activations=true: keeps the input of each layer instead of all its activations, often "
            "a tenth of them, for a third more work"
        )
    if (kept := min(learner.kept_logits_gib * 2**30, tokens * vocabulary * _WEIGHT_BYTES)) >= 2**30:
        yield (
            f"learner.kept_logits_gib=0 (now {learner.kept_logits_gib:g}): computes logits again in the backward pass, "
            f"which saves up to {show_bytes(int(kept))} and takes a few per cent longer"
        )
    if learner.convert_at_once and config.lora.rank == 0 and _uses_gpu(config):
        yield (
            "learner.convert_at_once=false: with a single rank, converts one layer at a time instead of all weights, "
            f"which saves up to {show_bytes(_COPY_BYTES * num_weights)} and takes longer"
        )
    if not learner.offload_optimizer and config.lora.rank == 0 and _uses_gpu(config):
        saved = _AVERAGES_BYTES * num_weights
        yield f"learner.offload_optimizer=true: keeps AdamW's averages in main memory, which saves {show_bytes(saved)}"
    if config.critic.enabled:
        total = (2 * _WEIGHT_BYTES + _AVERAGES_BYTES) * num_weights
        yield (
            f"critic.path=SMALLER_MODEL, or an advantage without critic such as grpo, {NEW_RUN}: saves up to "
            f"{show_bytes(total)}"
        )


def _of_forward(config: Config, vocabulary: int) -> Iterator[str]:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = config.learner.forward_tokens
    if (fewer := max(longest, tokens // 2)) < tokens:
        saved = (tokens - fewer) * vocabulary * _WEIGHT_BYTES
        yield (
            f"learner.max_tokens_per_forward_pass={fewer} (now {tokens}): a pass needs {100 * fewer / tokens:.0f}% of "
            f"its memory, and its logits up to {show_bytes(saved)} less"
        )


def _of_generation(config: Config, num_weights: int) -> Iterator[str]:
    engine = config.engine
    on_gpu = _uses_gpu(config, config.rollout.device if config.rollout.is_separate else "auto")
    yield f"{_smaller_cache(config)}: halves the KV cache"
    sequences = engine.max_sequences or (GPU_SEQUENCES if on_gpu else CPU_SEQUENCES)
    yield f"engine.max_sequences={max(1, sequences // 2)} (now {sequences}): halves the memory of a decode step"
    prefill = engine.max_prefill_tokens or (GPU_PREFILL_TOKENS if on_gpu else CPU_PREFILL_TOKENS)
    yield f"engine.max_prefill_tokens={max(1, prefill // 2)} (now {prefill}): halves the memory of a prefill pass"
    if on_gpu and _can_take_turns(config):
        saved = (_WEIGHT_BYTES + _AVERAGES_BYTES) * num_weights
        yield (
            f"learner.offload_during_rollout=true: moves the learner to main memory during generation, which frees "
            f"{show_bytes(saved)}"
        )
