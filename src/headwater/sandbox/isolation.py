"""Chooses what isolates programs on this machine, by trying it."""

from __future__ import annotations

import logging
import math
import os
import sys

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox.cell_link import CellLost
from headwater.sandbox.inside.confine import Bounds
from headwater.sandbox.launch import Kind, find_bubblewrap
from headwater.sandbox.records import Request, SandboxUnavailable
from headwater.sandbox.zygote_process import ZygoteLost, ZygoteProcess

logger = logging.getLogger(__name__)

_CANDIDATES: dict[str, tuple[Kind, ...]] = {
    "auto": ("bubblewrap", "namespaces", "bubblewrap-single"),
    "bubblewrap": ("bubblewrap", "bubblewrap-single"),
    "namespaces": ("namespaces",),
    "unprotected": ("unprotected",),
}
_PROBE_LIMIT_S = 60.0
_UNPROTECTED = (
    "sandbox.isolation=unprotected: code of the model runs with the rights of this process. It can read and change "
    "your files, use the network and see other processes. Only limits on time, memory and processes apply."
)
_warned: set[str] = set()


def choose(config: SandboxConfig) -> ZygoteProcess:
    """Start a zygote with the first kind of isolation that works; it has run a program as a test."""
    failures = []
    for kind in _CANDIDATES[config.isolation]:
        try:
            return start(kind, config)
        except (ZygoteLost, CellLost) as error:
            failures.append(f"{kind}: {complaint(kind, str(error))}")
    raise SandboxUnavailable(_refusal(config.isolation, failures))


def start(kind: Kind, config: SandboxConfig) -> ZygoteProcess:
    """Start a zygote and have it run a program. Raises ZygoteLost or CellLost if this isolation does not work here."""
    if kind == "unprotected" and kind not in _warned:
        _warned.add(kind)
        logger.warning(_UNPROTECTED)
    zygote = ZygoteProcess(kind, config)
    try:
        _probe(zygote)
    except (CellLost, ZygoteLost):
        zygote.close()
        raise
    if kind == "bubblewrap-single":  # it serves one program only
        zygote.close()
        return ZygoteProcess(kind, config)
    return zygote


def _probe(zygote: ZygoteProcess) -> None:
    """Run the smallest program."""
    if zygote.kind == "unprotected":
        return
    bounds = Bounds(1 << 30, _PROBE_LIMIT_S, _PROBE_LIMIT_S, 8, 1 << 20, 1 << 10)
    link = zygote.make_cell("run", bounds, 1 << 20)
    try:
        link.send(Request("print(6 * 7)").message())
        outcome = link.wait_for_exit(_PROBE_LIMIT_S)
    finally:
        link.close()
    if outcome.stdout != "42\n":
        raise CellLost(f"a test program ended with {outcome.status}: {outcome.stderr.strip() or outcome.detail}")


def complaint(kind: Kind, last_words: str) -> str:
    """Why an isolation does not work, from the last words of its process."""
    if kind.startswith("bubblewrap") and find_bubblewrap() is None:
        return "the program bwrap is not installed"
    return last_words


def _refusal(isolation: str, failures: list[str]) -> str:
    lines = [
        f"sandbox.isolation = {isolation}: no isolation works on this machine, so code of the model is not run.",
        *(f"  {each}" for each in failures),
        "Possible remedies:",
        *(f"  - {each}" for each in remedies()),
    ]
    return "\n".join(lines)


def remedies() -> list[str]:
    """What the user can do so that an isolation works."""
    found = []
    if sys.platform != "linux":
        found.append("run on Linux; other systems have no isolation that Headwater can use")
    else:
        if find_bubblewrap() is None:
            found.append("install bubblewrap, for example with: apt install bubblewrap")
        if limit := _user_namespaces_are_off():
            found.append(limit)
        if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
            found.append(
                "start the container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined, "
                "so that it may make namespaces"
            )
    found.append("sandbox.isolation=unprotected runs the code with your own rights, if you trust it or the machine")
    return found


def _user_namespaces_are_off() -> str:
    for path, off, remedy in (
        ("/proc/sys/user/max_user_namespaces", 0, "sysctl user.max_user_namespaces=10000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", 0, "sysctl kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            1,
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for bwrap",
        ),
    ):
        try:
            with open(path) as file:
                value = float(file.read())
        except (OSError, ValueError):
            value = math.nan
        if value == off:
            return f"enable user namespaces: {remedy}"
    return ""
