"""A device that has run out of memory: at which stage, and which settings need less, with what each of them saves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from headwater.config.schema import Config
from headwater.core.disk import show_bytes
from headwater.core.errors import DeviceMemoryFull

_WEIGHT_BYTES = 4
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
    error: BaseException, stage: str, config: Config, shapes: Mapping[str, tuple[int, ...]]
) -> DeviceMemoryFull:
    """``shapes`` are those of the policy's weights."""
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    cause = str(error).partition("\n")[0][:300]
    lines = "\n".join(f"  - {line}" for line in remedies(stage, config, num_weights, _vocabulary(shapes)))
    return DeviceMemoryFull(
        f"out of memory while {_WORK.get(stage, stage)} ({cause}). The policy has {num_weights / 1e6:.0f} million "
        f"weights. These settings need less; change one, then resume:\n{lines}"
    )


def _vocabulary(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return max((shape[0] for shape in shapes.values() if len(shape) == 2), default=0)


def remedies(stage: str, config: Config, num_weights: int, vocabulary: int) -> Iterator[str]:
    """Settings that reduce the memory of a stage, those that cost the least speed first."""
    if stage in ("experience", "evaluate") or stage == "wait":
        yield from _of_forward(config, vocabulary) if stage == "experience" else _of_generation(config, num_weights)
    if stage == "train":
        yield from _of_update(config, num_weights, vocabulary)
    learner = config.learner
    if stage in ("train", "experience") and not learner.offload_during_rollout and not config.rollout.is_separate:
        fraction = config.engine.memory_fraction or 0.4
        yield (
            f"engine.memory_fraction={fraction / 2:g} (now {fraction:g}): the KV cache takes that share of the free "
            "memory, so this frees half of the cache; learner.offload_during_rollout=true frees all of it during "
            "training"
        )
    if stage in ("train", "experience", "publish") and config.lora.rank == 0:
        saved = (_WEIGHT_BYTES + _AVERAGES_BYTES) * num_weights
        yield f"lora.rank=16: trains adapters only, which saves about {show_bytes(saved)} of gradients and averages"


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
    if not learner.offload_optimizer and config.lora.rank == 0:
        saved = _AVERAGES_BYTES * num_weights
        yield f"learner.offload_optimizer=true: keeps AdamW's averages in main memory, which saves {show_bytes(saved)}"
    if config.critic.enabled:
        total = (2 * _WEIGHT_BYTES + _AVERAGES_BYTES) * num_weights
        yield f"critic.path=SMALLER_MODEL, or an advantage without critic such as grpo: saves up to {show_bytes(total)}"


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
    fraction = engine.memory_fraction or 0.4
    yield f"engine.memory_fraction={fraction / 2:g} (now {fraction:g}): halves the KV cache"
    sequences = engine.max_sequences or 1024
    yield f"engine.max_sequences={max(1, sequences // 2)} (now {sequences}): halves the memory of a decode step"
    prefill = engine.max_prefill_tokens or 16384
    yield f"engine.max_prefill_tokens={max(1, prefill // 2)} (now {prefill}): halves the memory of a prefill pass"
    if not config.rollout.is_separate and not config.learner.offload_during_rollout:
        saved = (_WEIGHT_BYTES + _AVERAGES_BYTES) * num_weights
        yield (
            f"learner.offload_during_rollout=true: moves the learner to main memory during generation, which frees "
            f"{show_bytes(saved)}"
        )
