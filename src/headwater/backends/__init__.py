"""Inference engines behind one interface, one file each (see ``core.protocols.InferenceEngine``).

A backend class is made with ``from_context(BackendContext)``: it loads, starts or connects to whatever it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.config.schema import Config
from headwater.core.protocols import Tokenizer
from headwater.core.registry import Registry
from headwater.observe.spans import Spans

BACKENDS = Registry("backend", "headwater.backends")


@dataclass(frozen=True)
class BackendContext:
    """What every backend is given to start from."""

    config: Config
    model_path: str
    """A folder, hub id or built-in name; a checkpoint's model when a run is resumed."""
    tokenizer: Tokenizer
    spans: Spans
