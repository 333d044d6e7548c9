"""Reward managers, one file each: how finished responses are handed to scoring functions."""

from headwater.core.registry import Registry

REWARD_MANAGERS = Registry("reward manager", "headwater.rewards.managers")
