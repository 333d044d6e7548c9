"""Real training parts on a tiny model, and batches whose every number is known."""

from __future__ import annotations

import random
from dataclasses import replace

import tiny
import torch

from headwater.config.load import load_config
from headwater.core.records import Trajectory
from headwater.learner.build import LearnerSpec
from headwater.rollout.group import Group, RolloutBatch, pad_trajectories
from headwater.trainer.learner_setup import TrainingParts, build_training

RECIPE = "quickstart"


def training(*overrides: str) -> TrainingParts:
    settings = ["data.num_train_rows=32", "warm_start.num_steps=0", "learner.learning_rate=1e-2", *overrides]
    config = load_config(RECIPE, settings).config
    return build_training(LearnerSpec(config, config.model.path, config.model.path), tiny.tokenizer())


def trajectory(uid: str, sample: int, tokens: tuple[int, ...], num_response: int, **fields) -> Trajectory:
    """A prompt and a response of ``num_response`` tokens, all trained, unless ``loss_mask`` says otherwise."""
    mask = fields.pop("loss_mask", (1,) * num_response)
    num_prompt = len(tokens)
    rng = random.Random(f"{uid}{sample}")
    return Trajectory(
        uid=uid,
        sample=sample,
        tokens=tokens + tuple(rng.randrange(6, 512) for _ in range(num_response)),
        prompt_length=num_prompt,
        loss_mask=(0,) * num_prompt + tuple(mask),
        logprobs=(0.0,) * num_prompt + tuple(-rng.random() * each for each in mask),
        versions=(-1,) * num_prompt + tuple(0 if each else -1 for each in mask),
        **{"reward": rng.random(), "stop_reason": "stop", **fields},
    )


def batch(num_groups: int = 2, num_samples: int = 4, baselines: tuple[float, ...] = (), **fields) -> RolloutBatch:
    """Responses of one to four tokens."""
    groups = []
    for number in range(num_groups):
        prompt = tiny.prompt(f"Largest of {number}{number}7?", uid=f"row{number}")
        samples = [
            trajectory(prompt.uid, sample, prompt.tokens, 1 + sample % 4, **fields) for sample in range(num_samples)
        ]
        groups.append(Group(prompt, tuple(samples), baselines[number] if baselines else None))
    return RolloutBatch(tuple(groups))


def with_logprobs(rollouts: RolloutBatch, logprobs: torch.Tensor) -> RolloutBatch:
    """The same rollouts as if the engine had recorded ``logprobs`` ``[samples, response]``."""
    rows = iter(logprobs.tolist())

    def recorded(each: Trajectory) -> Trajectory:
        response = next(rows)[: len(each.response_tokens)]
        return replace(each, logprobs=(0.0,) * each.prompt_length + tuple(response))

    groups = [replace(group, trajectories=tuple(map(recorded, group.trajectories))) for group in rollouts.groups]
    return replace(rollouts, groups=tuple(groups))


def policy_logprobs(parts: TrainingParts, rollouts: RolloutBatch) -> torch.Tensor:
    return parts.learner.compute(pad_trajectories(rollouts.trajectories, pad_token_id=0), ["logprobs"])["logprobs"]


def scores(rollouts: RolloutBatch) -> torch.Tensor:
    return torch.tensor([each.reward for each in rollouts.trajectories])


def move_policy(parts: TrainingParts, rollouts: RolloutBatch) -> None:
    """One update, so that the policy is no longer the one it started as."""
    parts.learner.update(parts.experience.make(rollouts, version=0).data)
