"""How many files and connections this process may have open."""

from __future__ import annotations

import contextlib
import resource

_MOST = 65536


def allow_many_descriptors() -> int:
    """Raise the limit as far as the system allows, and return it. The usual 1,024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return _MOST if soft == resource.RLIM_INFINITY else soft
