"""Advantage estimators, one file each: ``f(rewards, mask, groups, **settings) -> advantages``.

``rewards`` and ``mask`` are ``[samples, tokens]``; ``groups`` gives each sample the number of its prompt.
"""

from headwater.core.registry import Registry

ADVANTAGES = Registry("advantage", "headwater.algorithms.advantages")
