"""What has no effect in a run although someone asked for it, and what may have been forgotten. Each is reported
once, when a run starts.

A setting that contradicts others is an error (``checks.py``). A notice is for what is right elsewhere: a recipe for
GPUs may run on a CPU, and a data file may have columns for other programs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from headwater.config.keys import settings, value_at
from headwater.config.schema import Config, WeightTransfer
from headwater.config.server_checks import backend_traits
from headwater.config.tree import show

GPU_ONLY = (
    "engine.overlap",
    "engine.keep_addresses",
    "learner.convert_at_once",
    "learner.cuda_graphs",
    "learner.fused_layers",
    "learner.join_projections",
    "learner.keep_logits_if_free",
    "learner.offload_optimizer",
    "learner.residency",
)
"""Settings that nothing reads on a CPU."""
_TRAINING_ONLY = ("learner", "critic", "algorithm", "trainer", "warm_start", "reference")
_READ_BY_EVAL = ("trainer.num_threads", "trainer.best_metric")
_LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""The variables that tell how many processes these programs have started."""


@dataclass(frozen=True)
class Notice:
    subject: str
    """The setting and its value, or the part of the data."""
    text: str
    """Why it has no effect, or what happens without it, and what to do if that is not meant."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


def config_notices(
    config: Config,
    given: Collection[str] = (),
    automatic: str | None = None,
    chosen_transfer: WeightTransfer | None = None,
) -> list[Notice]:
    """``given`` are the keys that were set explicitly. ``automatic`` is the device that ``auto`` stands for; None if
    it is not known here. ``chosen_transfer`` is what the run has chosen for ``rollout.weight_transfer = auto`` on a
    Ray cluster."""
    if len(given) >= len(settings(Config)):
        given = ()  # a resolved recipe gives every key
    return [
        *_gpu_only(config, given, automatic),
        *_interpolation(config),
        *_one_rank(config),
        *_several_ranks(config, given),
        *_running_ray(config),
        *_weight_link(config, given, automatic, chosen_transfer),
        *_no_forward_pass(config),
        *_separate(),
        *_forgotten(config, given),
    ]


def eval_notices(overrides: Collection[str]) -> Iterator[Notice]:
    """Settings on the command line of ``headwater eval`` that only training reads."""
    for each in overrides:
        key = each.partition("=")[0]
        section, _, name = key.partition(".")
        if key in settings(Config) and section == "rollout" and f"eval.{name}" in settings(Config):
            # The longest response of evaluation is that of training unless it is given.
            if name != "max_new_tokens":
                yield Notice(each, f"is for training and has no effect here; set eval.{name}")
        elif section in _TRAINING_ONLY and key not in _READ_BY_EVAL:
            yield Notice(each, "is for training and has no effect here")


def _gpu_only(config: Config, given: Collection[str], automatic: str | None) -> Iterator[Notice]:
    also = [f"engine.{name}" for name in backend_traits(config).gpu_settings]
    for key in (*GPU_ONLY, *also):
        value = value_at(config, key)
        if value == settings(Config)[key].default() and key not in given:
            continue
        source, device = _device_of(key, config)
        if device == "auto" and automatic is None:
            yield Notice(f"{key} = {show(value)}", f"has no effect if {source} = auto finds no GPU")
        elif (automatic if device == "auto" else device) == "cpu":
            yield Notice(f"{key} = {show(value)}", f"has no effect on a CPU ({source} = {device})")


def _device_of(key: str, config: Config) -> tuple[str, str]:
    is_separate = config.rollout.is_separate and config.rollout.device != "auto"
    source = "rollout.device" if key.startswith("engine.") and is_separate else "model.device"
    return source, value_at(config, source)


def _one_rank(config: Config) -> Iterator[Notice]:
    """What only a learner of several ranks reads. torchrun says how many there are."""
    key = "learner.rank_timeout_s"
    has_one = config.cluster.kind == "local" and os.environ.get("WORLD_SIZE", "1") == "1"
    if has_one and value_at(config, key) != settings(Config)[key].default():
        yield Notice(f"{key} = {show(value_at(config, key))}", "has no effect, because the learner is one process")


def _several_ranks(config: Config, given: Collection[str]) -> Iterator[Notice]:
    """What only a learner of one process reads, if someone asked for it."""
    is_ray = config.cluster.kind == "ray"
    num_ranks = str(config.cluster.learner.num_ranks) if is_ray else os.environ.get("WORLD_SIZE", "1")
    for key in ("learner.convert_at_once", "learner.join_projections"):
        if num_ranks != "1" and key in given and value_at(config, key):
            yield Notice(
                f"{key} = {show(value_at(config, key))}", f"has no effect, because there are {num_ranks} ranks"
            )


def _no_forward_pass(config: Config) -> Iterator[Notice]:
    algorithm, tokens = config.algorithm, config.learner.max_tokens_per_forward_pass
    has_other_models = config.critic.enabled or config.reward.model or algorithm.kl_in_loss or algorithm.kl_in_reward
    is_asked = algorithm.old_logprobs != "rollout" or config.trainer.save_learner_logprobs
    if tokens and not (has_other_models or is_asked):
        yield Notice(
            f"learner.max_tokens_per_forward_pass = {tokens}",
            "has no effect, because the run computes no pass without gradients: algorithm.old_logprobs = rollout, and "
            "there is no critic, reference or reward model",
        )


def _running_ray(config: Config) -> Iterator[Notice]:
    size, address = config.cluster.object_store_mib, os.environ.get("RAY_ADDRESS", "")
    if config.cluster.kind == "ray" and size and address:
        yield Notice(
            f"cluster.object_store_mib = {size}",
            f"has no effect, because RAY_ADDRESS = {address} names a Ray that runs already",
        )


def _weight_link(
    config: Config, given: Collection[str], automatic: str | None, chosen_transfer: WeightTransfer | None
) -> Iterator[Notice]:
    """``auto`` never means NCCL. Ray gives every rank and every disaggregated server its own GPUs, which NCCL needs."""
    rollout = config.rollout
    has_gpus = automatic == "cuda" and rollout.placement == "disaggregated" and rollout.device != "cpu"
    # SGLang gets its weights from the process of the training loop, which has no GPU in a cluster.
    can_use_nccl = has_gpus and not backend_traits(config).is_foreign
    if chosen_transfer == "collective" and can_use_nccl and "rollout.weight_link" not in given:
        yield Notice(
            "rollout.weight_transfer = auto",
            "sends weights with gloo, through main memory; rollout.weight_transfer=collective rollout.weight_link=nccl "
            "sends them from GPU to GPU (not tested on several GPUs yet)",
        )


def _separate() -> Iterator[Notice]:
    """Processes that do not know of each other. It may be meant, for example for several seeds."""
    for variable, program in _LAUNCHERS.items():
        number = os.environ.get(variable, "1")
        if number.isdecimal() and int(number) > 1 and "WORLD_SIZE" not in os.environ:
            yield Notice(
                f"{variable} = {number}",
                f"{program} has started {number} independent runs; for one run with {number} ranks, "
                f"use torchrun --nproc-per-node {number} -m headwater train",
            )


def _interpolation(config: Config) -> Iterator[Notice]:
    if config.algorithm.old_logprobs == "loglinear" and config.rollout.max_staleness == 0:
        yield Notice(
            "algorithm.old_logprobs = loglinear",
            "is the same as rollout with rollout.max_staleness = 0, because no token is older than the policy; use "
            "recompute, or a larger rollout.max_staleness",
        )


def _forgotten(config: Config, given: Collection[str]) -> Iterator[Notice]:
    """The defaults of model and data let any recipe start, but who gives other settings does not mean them."""
    if given and "model.path" not in given:
        yield Notice(
            "model.path is not given",
            f"the run trains {config.model.path}, a tiny model with random weights; give a folder, a hub id or smollm2",
        )
    if given and "data.train" not in given and not config.data.dataset:
        yield Notice(
            "data.train is not given",
            f"the run trains on {show(list(config.data.train))}, a built-in task; give your own files, or another task",
        )
