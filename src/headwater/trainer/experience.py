"""Turns rollouts into what the learner trains on: log-probs, values, rewards, advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwater.algorithms.advantages import AdvantageInputs, Advantages
from headwater.algorithms.corrections import CorrectionFunction, CorrectionInputs, apply_corrections
from headwater.algorithms.diagnostics import (
    explained_variance,
    gap_metrics,
    gap_sums,
    offpolicy_metrics,
    ratio_percentiles,
    staleness_histogram,
    token_statistics,
)
from headwater.algorithms.groups import piece_weights
from headwater.algorithms.kl import KLController, PenalizedRewards, penalize_rewards
from headwater.algorithms.masked import keep, masked_mean
from headwater.algorithms.normalize import normalize, normalize_rewards, overlong_penalty, scale_scores
from headwater.algorithms.proximal import approximation_metrics
from headwater.config.schema import Config, NormalizationConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError, RunError
from headwater.core.learner import MEASURES_ITSELF, Learner
from headwater.core.records import MAX_REWARD, REWARD_RULE, Answer, Trajectory
from headwater.rollout.group import RolloutBatch, add_to_scores, pad_trajectories, score_columns
from headwater.trainer.logprob_sources import needs_logprobs_first

LEARNER_LOGPROBS, ENTROPIES = "learner_logprobs", "entropies"
_SAVED = ("advantages", "returns", "values", "reference_logprobs")
"""The columns of an experience that the files of rollouts contain."""

AdvantageFunction = Callable[[AdvantageInputs], Advantages]


@dataclass(frozen=True)
class Experience:
    data: DataProto
    metrics: Mapping[str, float]
    batch: RolloutBatch
    """The rollouts, with their scores."""
    saved: Mapping[str, Tensor]
    """What the files of rollouts contain about each token, ``[samples, response]``."""


@dataclass(frozen=True)
class ExperienceMaker:
    """Adds columns to a batch of rollouts. Which ones depends on the config: a critic adds values, for example."""

    config: Config
    advantage: AdvantageFunction
    corrections: Mapping[str, CorrectionFunction]
    kl: KLController
    learner: Learner
    pad_token_id: int

    @cached_property
    def _needs_logprobs(self) -> Mapping[bool, bool]:
        """Whether a step computes log-probs before its update, by whether it writes a file of rollouts."""
        return {is_saved: needs_logprobs_first(self.config, is_saved=is_saved) for is_saved in (False, True)}

    def make(
        self, batch: RolloutBatch, version: int, join: Callable[[Trajectory], Trajectory] | None = None
    ) -> Experience:
        """Rollouts as a padded batch with ``old_logprobs``, ``advantages`` and ``returns``, ``[samples, response]``.

        ``old_logprobs`` are missing if the update takes them from its own passes (``needs_logprobs_first``), which
        ``MEASURES_ITSELF`` asks for.
        With a reference model, ``rewards`` contain ``kl_rewards``, the penalty of each token.
        If an episode has several pieces, ``sequence_weights`` ``[samples]`` gives each piece its share of the episode.
        ``version`` is the version of the policy that is trained next. ``join`` adds the score to a trajectory; it is
        called after everything that needs a model was computed.
        """
        data = pad_trajectories(batch.trajectories, self.pad_token_id).with_columns(meta_info={"version": version})
        metrics: dict[str, float] = {}
        computed = self._compute(batch, data, version)
        if join is not None:
            batch = batch.with_trajectories(join)
            scored = pad_trajectories(batch.trajectories, self.pad_token_id).batch["rewards"]
            data = data.with_columns(tensors={"rewards": scored})
        columns = self._old_policy(data, version, computed, metrics)
        corrected = self._corrected(data, columns, metrics)
        rewards = self._rewards(batch, data, computed, metrics)
        if "reference_logprobs" in computed:
            columns["reference_logprobs"] = computed["reference_logprobs"]
            penalized = self._penalized(rewards, data, columns, metrics)
            rewards, columns["kl_rewards"] = penalized.rewards, penalized.kl_rewards
        if "values" in computed:
            columns["values"] = computed["values"]
        mask, groups, episodes = data.batch["response_mask"], batch.group_numbers(), batch.episode_numbers()
        estimated = self.advantage(
            AdvantageInputs(
                rewards,
                mask,
                groups,
                episodes=episodes,
                values=columns.get("values"),
                final_values=computed.get("final_values"),
                baselines=batch.baselines(),
                turns=_turns(mask),
                reward_parts=_reward_parts(batch),
                old_logprobs=columns.get("old_logprobs"),
                sum_pi_squared=columns.pop("sum_pi_squared", None),
                weights=corrected.get("correction_weights"),
            )
        )
        settings, weights = self.config.algorithm.normalize_advantages, piece_weights(episodes, mask)
        advantages = normalized(estimated.advantages, settings, groups, mask, weights, episodes)
        columns |= {"rewards": rewards, "advantages": advantages, "returns": estimated.returns}
        metrics |= _value_metrics(columns, mask)
        # Corrections may have removed whole pieces, so the weights in the loss can differ from those above.
        weights = piece_weights(episodes, corrected.get("response_mask", mask))
        if weights is not None:
            columns["sequence_weights"] = weights
        saved = self._saved(data, version, {**columns, **computed})
        data = data.with_columns({**columns, **corrected}, meta_info={MEASURES_ITSELF: "old_logprobs" not in columns})
        return Experience(data, metrics, batch, saved)

    def _saved(self, data: DataProto, version: int, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns for the files of rollouts, if this step has one."""
        if not self._saves(version):
            return {}
        saved = {name: columns[name] for name in _SAVED if name in columns}
        if "logprobs" in columns:
            entropies = {ENTROPIES: columns["entropy"]} if "entropy" in columns else {}
            return {**saved, LEARNER_LOGPROBS: columns["logprobs"], **entropies}
        return {**saved, **self._learner_logprobs(data)}

    def _saves(self, version: int) -> bool:
        every = self.config.trainer.save_rollouts_every_steps
        return every > 0 and (version + 1) % every == 0

    def saved_of(self, trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
        """Columns for the files of evaluations: the learner's log-probs and entropies, if the config asks for them."""
        return self._learner_logprobs(pad_trajectories(trajectories, self.pad_token_id))

    def _learner_logprobs(self, data: DataProto) -> dict[str, Tensor]:
        if not self.config.trainer.save_learner_logprobs:
            return {}
        computed = self.learner.compute(data, ["logprobs"])
        return {LEARNER_LOGPROBS: computed["logprobs"], ENTROPIES: computed["entropy"]}

    def _compute(self, batch: RolloutBatch, data: DataProto, version: int) -> Mapping[str, Tensor]:
        """Everything that needs a model, in one call of the learner."""
        config = self.config
        wanted = {
            "logprobs": self._needs_logprobs[self._saves(version)],
            "reference_logprobs": config.algorithm.kl_in_loss > 0 or config.algorithm.kl_in_reward > 0,
            "values": config.critic.enabled and not config.critic.bootstrap_unfinished,
            "reward_model": bool(config.reward.model),
        }
        what = [name for name, is_wanted in wanted.items() if is_wanted]
        valued = self._values(batch, data) if config.critic.enabled and config.critic.bootstrap_unfinished else {}
        if not what:
            return valued
        if wanted["reward_model"]:
            data = data.with_columns(non_tensors={"conversation": _conversations(batch)})
        return {**self.learner.compute(data, what), **valued}

    def _values(self, batch: RolloutBatch, data: DataProto) -> dict[str, Tensor]:
        """``values``, and as ``final_values`` ``[samples]`` those after the last token of unfinished responses.

        The critic predicts before every token, so an unfinished response gets one more token, which nothing reads.
        """
        longer = [_lengthened(each, self.pad_token_id) for each in batch.trajectories]
        lengths = torch.tensor([len(each.response_tokens) for each in batch.trajectories])
        extended = pad_trajectories(longer, self.pad_token_id).with_columns(meta_info=dict(data.meta_info))
        values = self.learner.compute(extended, ["values"])["values"]
        mask = data.batch["response_mask"]
        # A finished response of full width has no column after its last token, and needs none.
        after = values.gather(1, lengths.clamp(max=values.shape[1] - 1)[:, None])[:, 0]
        return {
            "values": keep(values[:, : mask.shape[1]], mask),
            "final_values": after.masked_fill(~_unfinished(batch), 0.0),
        }

    def _old_policy(
        self, data: DataProto, version: int, computed: Mapping[str, Tensor], metrics: dict[str, float]
    ) -> dict[str, Tensor]:
        tensors, method = data.batch, self.config.algorithm.old_logprobs
        rollout, mask, versions = tensors["rollout_logprobs"], tensors["response_mask"], tensors["versions"]
        lags = staleness_histogram(versions, mask, version)
        metrics |= {f"staleness/lag_{lag}": count / sum(lags.values()) for lag, count in sorted(lags.items())}
        if "logprobs" not in computed:
            # Without the column, the learner is asked to take them from its own passes.
            return {} if method == "recompute" else {"old_logprobs": rollout}
        old = computed["logprobs"]
        gap = {
            **gap_metrics(*gap_sums(old, rollout, mask)),
            **offpolicy_metrics(old, rollout, mask),
            **ratio_percentiles(old - rollout, mask),
        }
        metrics |= {f"rollout_gap/{name}": value for name, value in gap.items()}
        metrics["rollout_logprob_gap"] = float(masked_mean((old - rollout).abs(), mask))
        if method == "metrics":
            metrics |= approximation_metrics(rollout, old, versions, version, mask)
        return {"old_logprobs": old, "sum_pi_squared": computed["sum_pi_squared"]}

    def _rewards(
        self, batch: RolloutBatch, data: DataProto, computed: Mapping[str, Tensor], metrics: dict[str, float]
    ) -> Tensor:
        rewards: Tensor = data.batch["rewards"]
        settings = self.config.reward
        columns = torch.from_numpy(score_columns(batch.trajectories, data.batch["response_mask"].numpy()))
        if "reward_model" in computed:
            scores = computed["reward_model"]
            metrics["reward_model/mean"] = float(scores.mean())
            rewards = add_to_scores(rewards, settings.model_weight * scores, columns)
        if settings.overlong_tokens:
            lengths = torch.tensor([len(each.response_tokens) for each in batch.trajectories])
            if settings.overlong_counts == "trained":
                lengths = data.batch["response_mask"].sum(dim=1)
            penalty = overlong_penalty(
                lengths,
                max_tokens=self.config.rollout.max_new_tokens,
                buffer_tokens=settings.overlong_tokens,
                factor=settings.overlong_penalty,
            )
            metrics["reward/overlong_penalty"] = float(penalty.mean())
            rewards = add_to_scores(rewards, penalty, columns)
        if (settings.bias, settings.scale, settings.clip) != (0.0, 1.0, 0.0):
            rewards = scale_scores(rewards, columns, bias=settings.bias, scale=settings.scale, clip=settings.clip)
        normalization = self.config.algorithm.normalize_rewards
        if normalization.is_on:
            rewards = normalize_rewards(
                rewards,
                columns,
                groups=batch.group_numbers(),
                episodes=batch.episode_numbers(),
                **asdict(normalization),
            )
        if settings.zero_unfinished:
            rewards = rewards.masked_fill(_unfinished(batch)[:, None], 0.0)
        if not (rewards.abs() <= MAX_REWARD).all():
            raise DataError(
                f"the rewards of step {data.meta_info['version'] + 1} are not within ±{MAX_REWARD:g} after "
                "reward.bias, reward.scale, reward.model_weight and algorithm.normalize_rewards, so sums of them would "
                "overflow; lower reward.scale or reward.model_weight, or set reward.clip"
            )
        return rewards

    def _penalized(
        self, rewards: Tensor, data: DataProto, columns: Mapping[str, Tensor], metrics: dict[str, float]
    ) -> PenalizedRewards:
        penalized = penalize_rewards(
            rewards,
            columns["old_logprobs"],
            columns["reference_logprobs"],
            data.batch["response_mask"],
            kind=self.config.algorithm.kl_estimator,
            coefficient=self.kl.coefficient,
            clamp=self.config.algorithm.kl_clamp,
        )
        metrics |= {"kl/reference": penalized.kl, "kl/coefficient": self.kl.coefficient}
        self.kl.update(penalized.kl, len(data))
        return penalized

    def _corrected(
        self, data: DataProto, columns: Mapping[str, Tensor], metrics: dict[str, float]
    ) -> dict[str, Tensor]:
        if not self.corrections:
            return {}
        mask = data.batch["response_mask"]
        inputs = CorrectionInputs(columns["old_logprobs"], data.batch["rollout_logprobs"], mask)
        corrected, shown = apply_corrections(self.corrections, inputs)
        metrics |= {f"correction/{name}": value for name, value in shown.items()}
        if mask.any() and not corrected.mask.any():
            raise RunError(
                f"algorithm.corrections = {list(self.config.algorithm.corrections)}: left no token of step "
                f"{data.meta_info['version'] + 1} to train on; relax their bounds in algorithm.corrections_args, "
                "or find out why the engine's log-probs differ (rollout_gap/* in metrics.jsonl)"
            )
        metrics["correction/kept_fraction"] = float(corrected.mask.sum() / mask.sum())
        return {"correction_weights": corrected.weights, "response_mask": corrected.mask}


def normalized(
    values: Tensor,
    settings: NormalizationConfig,
    groups: Tensor,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    episodes: Tensor | None = None,
) -> Tensor:
    """Scores ``[samples]``, or advantages ``[samples, tokens]`` with their mask, normalised as AReaL does."""
    if not settings.is_on:
        return values
    return normalize(values, mask=mask, groups=groups, episodes=episodes, weights=weights, **asdict(settings))


def _value_metrics(columns: Mapping[str, Tensor], mask: Tensor) -> dict[str, float]:
    """Of advantages, returns and values of trained tokens, and of the rewards of responses as they are trained on."""
    named = {"advantage": "advantages", "return": "returns", "value": "values"}
    known = {name: columns[column] for name, column in named.items() if column in columns}
    measured = {name: token_statistics(values, mask) for name, values in known.items()}
    scores = columns["rewards"].sum(dim=1)
    measured["shaped_reward"] = token_statistics(scores, torch.ones_like(scores))
    metrics = {f"{name}/{statistic}": value for name, each in measured.items() for statistic, value in each.items()}
    if "values" in columns:
        metrics["value/explained_variance"] = explained_variance(columns["values"], columns["returns"], mask)
    return metrics


def _unfinished(batch: RolloutBatch) -> Tensor:
    """``[samples]``: whether a response reached its length limit."""
    return torch.tensor([each.stop_reason == "length" for each in batch.trajectories])


def _lengthened(trajectory: Trajectory, token: int) -> Trajectory:
    """An unfinished trajectory with one more token, marked as trained so that the critic values it."""
    if trajectory.stop_reason != "length":
        return trajectory
    return replace(
        trajectory,
        tokens=(*trajectory.tokens, token),
        loss_mask=(*trajectory.loss_mask, 1),
        logprobs=(*trajectory.logprobs, 0.0),
        versions=(*trajectory.versions, 0),
        turn_rewards=(),
    )


def _conversations(batch: RolloutBatch) -> list[list[Mapping[str, Any]]]:
    """What was said in each sample. A workflow that records no messages had one reply to the prompt."""
    return [
        list(each.messages or Answer(group.prompt, _response_text(each)).messages)
        for group in batch.groups
        for each in group.trajectories
    ]


def _response_text(trajectory: Trajectory) -> str:
    text = trajectory.info.get("response_text")
    if not isinstance(text, str):
        raise DataError(
            f"row {trajectory.uid}: reward.model scores responses as text, but the workflow returned none; "
            "add the conversation to the trajectory as messages, or a single reply as info['response_text']"
        )
    return text


def _reward_parts(batch: RolloutBatch) -> Tensor | None:
    """``[samples, parts]``: the lists that the scorer returned as ``reward_parts``, if every sample has one."""
    parts = [each.info["reward_parts"] for each in batch.trajectories if "reward_parts" in each.info]
    if len(parts) < len(batch.trajectories):
        return None
    try:
        found = torch.tensor([[float(part) for part in each] for each in parts])
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"reward_parts must be lists of numbers of the same length in every sample ({error}); fix reward.function"
        ) from error
    if not (found.abs() <= MAX_REWARD).all():
        raise DataError(f"reward_parts: every part {REWARD_RULE}; fix reward.function")
    return found


def _turns(mask: Tensor) -> Tensor:
    """The turn of each trained token. A new turn begins after tokens that the policy did not generate."""
    trained = mask != 0
    begins = trained & ~torch.nn.functional.pad(trained, (1, 0))[:, :-1]
    return (begins.cumsum(dim=1) - 1).masked_fill(~trained, -1)
