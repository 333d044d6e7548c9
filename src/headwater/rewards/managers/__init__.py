"""Reward managers, one file each: they pass finished episodes to scoring functions."""

from headwater.core.registry import Registry

REWARD_MANAGERS = Registry("reward manager", "headwater.rewards.managers")
