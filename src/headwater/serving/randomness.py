"""What a request's seed decides: every sampled token of each of its samples, whatever runs beside it."""

from __future__ import annotations

import secrets

from headwater.core.randomness import derive_key


def sample_keys(seed: int | None, num_samples: int) -> list[int]:
    """One key per sample of a prompt; without a seed they are new each time.

    They do not depend on the prompt's place in a batch or on the number of samples, so asking for one sample more, or
    for two prompts at once, leaves the others as they were.
    """
    base = derive_key("seed", seed) if seed is not None else secrets.randbits(64)
    return [derive_key(base, sample) for sample in range(num_samples)]
