"""What differs between versions of vLLM, in one table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headwater.core.errors import RolloutFailed


@dataclass(frozen=True)
class Dialect:
    """How to talk to one range of versions."""

    since: tuple[int, int]
    """The first version."""
    has_integer_logprobs: bool
    """Log-probs name their token by ``token_id``. Otherwise by ``token``, as ``token_id:17``."""
    labels_tokens: bool
    """Every response tells which label of weights produced which tokens, so that it may span an update."""
    batches_stream: bool
    """A request may say how many tokens a chunk of its stream has."""
    releases_cache_alone: bool
    """``/release_kv_cache_memory`` frees the KV cache and leaves the weights where they are."""


DIALECTS = (
    Dialect((0, 32), has_integer_logprobs=True, labels_tokens=True, batches_stream=True, releases_cache_alone=True),
    Dialect((0, 23), has_integer_logprobs=False, labels_tokens=False, batches_stream=False, releases_cache_alone=False),
)
"""The newest first. A version between two rows speaks the older of the two."""

_VERSION = re.compile(r"(\d+)\.(\d+)")


def dialect_of(version: str) -> Dialect:
    """The row of the table for a version such as ``0.32.0+cpu``."""
    found = _VERSION.match(version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    for dialect in DIALECTS:
        if number >= dialect.since:
            return dialect
    oldest = ".".join(map(str, DIALECTS[-1].since))
    raise RolloutFailed(f"vLLM {version} is not supported; install vLLM {oldest} or newer for the server")
