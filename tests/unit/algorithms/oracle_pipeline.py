"""AReaL's whole advantage pipeline, through the settings of a recipe and what the loop itself calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

import tiny
import torch
from algorithms.oracle import family, tensor
from trainer.experience_parts import trajectory

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.kl import FixedKL
from headwater.config.arguments import with_arguments
from headwater.config.load import load_config
from headwater.rollout.group import Group, RolloutBatch
from headwater.trainer.experience import ExperienceMaker

REWARDS, ADVANTAGE_NORM = "algorithm.normalize_rewards", "algorithm.normalize_advantages"
SHAPING = {"reward_bias": "bias", "reward_scaling": "scale", "reward_clip": "clip"}
GIVEN = {"values": "values", "ref_logp": "reference_logprobs", "prox_logp": "logprobs"}


@dataclass
class Given:
    """A learner whose models have computed these columns, one column longer than the longest response."""

    columns: dict[str, torch.Tensor]

    def compute(self, data, what):
        assert set(what) <= set(self.columns)
        width = data.batch["response_mask"].shape[1]
        return {name: values[:, :width] for name, values in self.columns.items()}


def flag(value) -> str:
    return str(bool(value)).lower()


def normalization(key: str, norm: dict | None) -> list[str]:
    if norm is None:
        return []
    given = {"mean_level": norm["mean_level"] or "none", "std_level": norm["std_level"] or "none"}
    given |= {"leave_one_out": flag(norm["mean_leave1out"])} if "mean_leave1out" in norm else {}
    given |= {"unbiased": flag(norm["std_unbiased"])} if "std_unbiased" in norm else {}
    given |= {"epsilon": norm["eps"]} if "eps" in norm else {}
    return [f"{key}.{name}={value}" for name, value in given.items()]


def is_recomputed(args) -> bool:
    return not args["use_decoupled_loss"] and bool(args["recompute_logprob"])


def recipe(args: dict, inputs: dict) -> list[str]:
    """The case's arguments as settings. Without a critic, GAE is a return with one discount."""
    if "values" in inputs:
        arguments = f"{{gamma: {args['discount']}, lam: {args['gae_lambda']}, whitened: false}}"
        settings = ["algorithm.advantage=gae", "critic.enabled=true", "critic.bootstrap_unfinished=true"]
    else:
        arguments = f"{{gamma: {args['discount'] * args['gae_lambda']}, whitened: false}}"
        settings = ["algorithm.advantage=reinforce_plus_plus"]
    settings += [f"algorithm.advantage_args={arguments}"]
    settings += normalization(REWARDS, args.get("reward_norm")) + normalization(ADVANTAGE_NORM, args.get("adv_norm"))
    settings += [f"reward.{name}={args[key]}" for key, name in SHAPING.items()]
    settings += [f"reward.zero_unfinished={flag(args['mask_no_eos_with_zero'])}"]
    if args.get("overlong_reward_penalty"):
        settings += [f"reward.overlong_tokens={args['overlong_tokens']}", "reward.overlong_counts=trained"]
        settings += [f"reward.overlong_penalty={args['overlong_penalty_factor']}"]
        settings += [f"rollout.max_new_tokens={args['max_new_tokens']}"]
    if args["kl_ctl"]:
        settings += [f"algorithm.kl_in_reward={args['kl_ctl']}", f"algorithm.kl_estimator={args['kl_estimator']}"]
        settings += ["algorithm.kl_clamp=all"]
    recomputes = ["algorithm.old_logprobs=recompute", "trainer.save_learner_logprobs=true"]
    return [*settings, *recomputes] if is_recomputed(args) else settings


def as_rollouts(inputs: dict, group_size: int) -> RolloutBatch:
    """The case's rows with their masks, log-probs and rewards; consecutive rows are of one prompt."""
    groups: dict[str, list] = {}
    for row, (mask, rows, logprobs, reward) in enumerate(
        zip(*(inputs[name] for name in ("loss_mask", "attention_mask", "logprobs", "rewards")), strict=True)
    ):
        start, end, uid = mask.index(1), sum(rows), f"row{row // group_size}"
        # AReaL considers a row without padding as cut off.
        fields = {"loss_mask": tuple(mask[start:end]), "stop_reason": "length" if all(rows) else "stop"}
        made = trajectory(uid, row, tuple(range(10, 10 + start)), end - start, reward=reward, **fields)
        given = (0.0,) * start + tuple(
            a if b else 0.0 for a, b in zip(logprobs[start:end], mask[start:end], strict=True)
        )
        groups.setdefault(uid, []).append(replace(made, logprobs=given))
    return RolloutBatch(tuple(Group(tiny.prompt(uid=uid), tuple(each)) for uid, each in groups.items()))


class Places:
    """Our columns begin with the first response token; AReaL's are the positions that predict, one to the left."""

    def __init__(self, inputs: dict) -> None:
        self.shape = tensor(inputs["attention_mask"]).shape
        self.starts = [mask.index(1) - 1 for mask in inputs["loss_mask"]]
        self.ends = [sum(rows) - 1 for rows in inputs["attention_mask"]]

    def ours(self, values) -> torch.Tensor:
        """One column more than the response: what AReaL has at the last token itself."""
        columns = torch.zeros(self.shape[0], 1 + max(b - a for a, b in zip(self.starts, self.ends, strict=True)))
        for row, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            columns[row, : end + 1 - start] = tensor(values[row])[start : end + 1]
        return columns

    def theirs(self, columns: torch.Tensor) -> torch.Tensor:
        values = torch.zeros(self.shape)
        for row, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            values[row, start:end] = columns[row, : end - start]
        return values


@family("areal_compute_advantages", where="loss_mask")
def run_compute_advantages(args, inputs):
    config = load_config(None, recipe(args, inputs)).config
    algorithm, places = config.algorithm, Places(inputs)
    given = {ours: places.ours(inputs[theirs]) for theirs, ours in GIVEN.items() if theirs in inputs}
    if is_recomputed(args):
        given["sum_pi_squared"] = torch.zeros_like(given["logprobs"])
    advantage = with_arguments(ADVANTAGES, algorithm.advantage, algorithm.advantage_args, "algorithm.advantage_args")
    maker = ExperienceMaker(config, advantage, {}, FixedKL(algorithm.kl_in_reward), Given(given), pad_token_id=0)
    group_size = (args.get("reward_norm") or args.get("adv_norm") or {}).get("group_size", 1)
    made = maker.make(as_rollouts(inputs, group_size), version=0).data.batch
    columns = {
        "advantages": made["advantages"],
        "returns": made["returns"],
        "kl_rewards": made.get("kl_rewards", torch.zeros_like(made["rewards"])),
        "tot_rewards": made["rewards"],
        "loss_mask": made["response_mask"],
        "logprobs": made["old_logprobs"],
    }
    return {name: places.theirs(values) for name, values in columns.items()}
