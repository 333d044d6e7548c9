"""Filters of complete groups: which of them are not worth training on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from headwater.core.errors import ConfigError, HeadwaterError, RolloutFailed
from headwater.core.records import DropKind
from headwater.core.registry import blaming, is_path, load_object
from headwater.rollout.group import Group

GroupFilter = Callable[[Group], bool]
"""Whether a group is kept."""

REASONS = {
    DropKind.FILTERED: "all samples have the same reward (algorithm.filter_groups)",
    DropKind.REFUSED: "rollout.should_accept returned false",
}


def scores_differ(group: Group) -> bool:
    return len(set(group.episode_rewards())) > 1


def load_should_accept(path: str) -> GroupFilter:
    """The function that ``rollout.should_accept`` names, called with the trajectories of a group.

    An error in it, or a result other than true or false, is a failure of the group and never a decision.
    """
    setting = f"rollout.should_accept = {path}"
    if not is_path(path):
        raise ConfigError([f"{setting}: write it as 'path/to/file.py:function' or 'package.module:function'"])
    with blaming(setting):
        function = load_object(path)
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        raise ConfigError([f"{setting}: must be a plain function, which takes a list of trajectories"])

    def accepts(group: Group) -> bool:
        try:
            result: Any = function(list(group.trajectories))
        except HeadwaterError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise RolloutFailed(
                f"{setting} on row {group.prompt.uid} raised {type(error).__name__}: {error}; fix it, or set "
                "rollout.on_failure=drop to drop and count such rows"
            ) from error
        if not isinstance(result, (bool, np.bool_)):
            raise RolloutFailed(
                f"{setting} on row {group.prompt.uid} returned {str(result)[:40]!r}; return True or False"
            )
        return bool(result)

    return accepts
