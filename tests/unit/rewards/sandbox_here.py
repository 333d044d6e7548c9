"""Whether programs can be isolated on this machine."""

from __future__ import annotations

from functools import cache

import pytest

from headwater.sandbox import Sandbox, SandboxUnavailable


@cache
def _complaint() -> str:
    with Sandbox() as sandbox:
        try:
            sandbox.start()
        except SandboxUnavailable as error:
            return str(error)
    return ""


def skip_without_sandbox() -> None:
    if complaint := _complaint():
        pytest.skip(f"NO SANDBOX ON THIS MACHINE: {complaint}")
