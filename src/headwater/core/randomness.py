"""Keys for counter-based randomness: a sample's randomness depends on its identity, not on the rest of the batch."""

from __future__ import annotations

import hashlib


def derive_key(*parts: int | str) -> int:
    """Derive a signed 64-bit key, for example ``derive_key(seed, "rollout", uid, sample)``."""
    # Lengths are part of the text, so that ("ab", "c") and ("a", "bc") differ.
    text = "".join(f"{len(str(part))}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
