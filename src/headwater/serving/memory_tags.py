"""The body of calls that are about the engine's memory, in every dialect: ``{"tags": ["kv_cache"]}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.core.protocols import ALL_TAGS, MemoryTag
from headwater.serving.errors import wrong
from headwater.serving.fields import Fields


def read_memory_tags(body: Mapping[str, Any]) -> tuple[MemoryTag, ...]:
    """Every tag where none is named."""
    fields = Fields(body)
    names = fields.texts("tags")
    fields.done()
    for place, name in enumerate(names):
        if name not in ALL_TAGS:
            raise wrong(f"tags[{place}]", name, f"must be one of {', '.join(ALL_TAGS)}")
    return tuple(tag for tag in ALL_TAGS if tag in names) if names else ALL_TAGS
