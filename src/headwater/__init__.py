"""Headwater: reinforcement-learning post-training of language models, as one loop with two settings.

from headwater import train

result = train("quickstart", trainer={"total_steps": 20})

Names are imported when they are used, so ``import headwater`` loads neither torch nor anything else that is slow.
"""

import importlib

__version__ = "0.1.0"

_PLACES = {
    "Callback": "headwater.trainer.callbacks",
    "Completion": "headwater.api.engine",
    "Config": "headwater.api.train",
    "ConfigError": "headwater.core.errors",
    "Engine": "headwater.api.engine",
    "Episode": "headwater.workflows.episode",
    "HeadwaterError": "headwater.core.errors",
    "Result": "headwater.api.train",
    "StopTraining": "headwater.trainer.callbacks",
    "Trainer": "headwater.api.train",
    "train": "headwater.api.train",
}

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'headwater' has no attribute {name!r}; it has {', '.join(_PLACES)}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
