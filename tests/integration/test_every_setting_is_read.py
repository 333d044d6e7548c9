"""No silent no-ops: every setting is read by the run that claims it, or is refused where it would be ignored."""

from __future__ import annotations

import dataclasses
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

import headwater.config
from headwater import train
from headwater.config.keys import hints, settings
from headwater.config.load import load_config
from headwater.config.notices import config_notices
from headwater.config.schema import Config
from headwater.core.errors import ConfigError

CONFIG_FOLDER = str(Path(headwater.config.__file__).parent)
READERS = ("schema.py", "rollout_schema.py", "cluster_schema.py", "arguments.py")
"""Files of the config folder whose reads count: properties of the schema, and arguments that are passed on."""

PLAIN_RUN = {
    "data": {"train": "largest_digit", "task_args": {"num_digits": 6, "demonstrations": "any_digit"}},
    "warm_start": {"num_steps": 1, "num_sequences_per_step": 4},
    "rollout": {"num_samples_per_prompt": 2, "max_new_tokens": 4},
    "trainer": {"total_steps": 1, "num_prompts_per_step": 4, "trace": True},
    "eval": {"num_prompts": 4},
}
RICH_RUN = {
    **PLAIN_RUN,
    "warm_start": {},
    "rollout": {"num_samples_per_prompt": 2, "max_new_tokens": 4, "max_staleness": 1, "on_stale": "drop"},
    "algorithm": {
        "advantage": "gae",
        "advantage_args": {"whitened": False},
        "kl_in_reward": 0.1,
        "kl_in_loss": 0.1,
        "kl_target": 0.1,
        "old_logprobs": "recompute",
        "corrections": ["truncate"],
        "filter_groups": True,
        "max_filter_rounds": 1,
        "normalize_rewards": {"mean_level": "batch", "std_level": "batch"},
        "normalize_advantages": {"mean_level": "batch"},
    },
    "learner": {"schedule": "linear", "skip_zero_advantages": False},
    "critic": {"enabled": True},
    "reward": {
        "overlong_tokens": 2,
        "clip": 5.0,
        "function": lambda solution_str: zlib.crc32(solution_str.encode()) % 7,
    },
    "lora": {"rank": 2},
}

ELSEWHERE: dict[str, str] = {}


@contextmanager
def recorded(found: set[str]) -> Iterator[None]:
    """Add the keys of all settings that code outside the checks reads."""
    keys: dict[tuple[type, str], list[str]] = {}
    for key, setting in settings(Config).items():
        keys.setdefault((setting.owner, setting.field.name), []).append(key)
    owners = {owner for owner, _ in keys}

    def read(self: Any, name: str) -> Any:
        if (type(self), name) in keys:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename in (dataclasses.__file__, __file__):
                frame = frame.f_back
            path = Path(frame.f_code.co_filename)
            if str(path.parent) != CONFIG_FOLDER or path.name in READERS:
                found.update(keys[type(self), name])
        return object.__getattribute__(self, name)

    for owner in owners:
        owner.__getattribute__ = read
    try:
        yield
    finally:
        for owner in owners:
            del owner.__getattribute__


@pytest.fixture(scope="module")
def read(tmp_path_factory) -> set[str]:
    found: set[str] = set()
    with recorded(found):
        for run in (PLAIN_RUN, RICH_RUN):
            root = tmp_path_factory.mktemp("runs")
            train(model="tiny:qwen3", progress=False, run={"root": str(root)}, **run)
    return found


def other_values(key: str) -> Iterator[Any]:
    """Values of a setting that are allowed for it alone and differ from its value in the plain run."""
    setting = settings(Config)[key]
    hint, default = setting.hint, setting.default()
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        yield from (choice for choice in get_args(hint) if choice != default)
    elif hint is bool:
        yield not default
    elif hint is int:
        yield from (default + 1, default * 2, 2)
    elif hint is float:
        yield from (default / 2, default + 0.25, 0.5, 0.25)
    elif hint is str:
        yield from ("cpu", "some", "a.py:b", "http://127.0.0.1:1")
    elif get_origin(hint) is Mapping:
        yield {"some": {"function": "exact"}} if key == "reward.functions" else {"some": 1}
    else:
        yield from (["some"], ["http://127.0.0.1:1"], ["cpu"], [3], ["a.py:b"])


def is_told(key: str) -> bool:
    """Whether a run that would ignore the setting is refused, or says so when it starts."""
    for value in other_values(key):
        try:
            loaded = load_config(None, [PLAIN_RUN, {key: value}])
        except ConfigError as error:
            told = any(problem.startswith(f"{key} = ") and "(Python)" in problem for problem in error.problems)
            if told and not is_wrong_alone(key, value):
                return True
            continue
        if any(notice.subject.startswith(key) for notice in config_notices(loaded.config, loaded.given, "cpu")):
            return True
    return False


def is_wrong_alone(key: str, value: Any) -> bool:
    """Whether the value does not even fit the type of the setting."""
    from headwater.config.convert import Converter
    from headwater.config.python_values import tree_of

    converter = Converter(Config)
    converter.build(tree_of({key: value}, 0, []))
    return bool(converter.problems)


def test_every_setting_is_read_or_refused(read):
    assert {"run.seed", "rollout.max_new_tokens", "learner.learning_rate", "critic.clip"} <= read
    unread = [key for key in settings(Config) if key not in read]
    ignored = [key for key in unread if not is_told(key) and key not in ELSEWHERE]
    assert not ignored, f"{len(ignored)} of {len(unread)} unread settings are ignored without a word: {ignored}"
    assert set(ELSEWHERE) <= set(unread)
    assert hints(Config)
