"""What protects this machine from code of a model: every property is tested by a program that tries to break it."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox.cell_link import CellLost
from headwater.sandbox.isolation import complaint, remedies, start
from headwater.sandbox.launch import ENVIRONMENT, Kind
from headwater.sandbox.records import Limits, Outcome, SandboxUnavailable
from headwater.sandbox.sandbox import Sandbox
from headwater.sandbox.zygote_process import ZygoteLost

_KINDS: tuple[Kind, ...] = ("bubblewrap", "namespaces")
_NUM_TIMED = 30
_LIMITS = Limits(timeout_s=20.0, cpu_s=10.0, memory_mib=96, max_processes=8, max_file_mib=8, max_output_kib=16)
_SHORT = Limits(timeout_s=1.0)


@dataclass(frozen=True)
class SandboxFinding:
    """One property of the sandbox."""

    name: str
    holds: bool
    text: str


@dataclass(frozen=True)
class Examination:
    """What isolates programs here, and how well."""

    isolation: str
    """The isolation that is used; empty if none works."""
    problem: str
    """Why no isolation works."""
    kinds: tuple[SandboxFinding, ...]
    """Every kind of isolation, and whether it works here."""
    properties: tuple[SandboxFinding, ...]
    milliseconds: float
    """Median time of the smallest program, one after the other."""
    remedies: tuple[str, ...]

    @property
    def is_safe(self) -> bool:
        return bool(self.isolation) and all(each.holds for each in self.properties)


@dataclass(frozen=True)
class _Try:
    """A program that tries to break a property."""

    name: str
    code: str
    is_held: Callable[[Outcome], bool]
    limits: Limits = _LIMITS


def _prints(text: str) -> Callable[[Outcome], bool]:
    return lambda outcome: outcome.stdout.strip() == text


def _ends(*statuses: str) -> Callable[[Outcome], bool]:
    return lambda outcome: outcome.status in statuses


def _has_known_environment(outcome: Outcome) -> bool:
    return outcome.is_ok and set(outcome.stdout.split()) <= {*ENVIRONMENT, "HOME", "TMPDIR", "PWD", "LC_CTYPE"}


def _try(body: str, errors: str = "OSError") -> str:
    """A program that prints `refused` if the body raises."""
    lines = "\n    ".join(body.splitlines())
    return f"import ctypes, os, socket\ntry:\n    {lines}\n    print('done')\nexcept {errors}:\n    print('refused')"


def _tries(secret_path: str, port: int) -> list[_Try]:
    refused = _prints("refused")
    processes = "import os\nprint(len([name for name in os.listdir('/proc') if name.isdigit()]))"
    privileges = (
        "import os\nprint([line.split()[1].strip('0') for line in open('/proc/self/status') if 'CapEff' in line])"
    )
    descriptors = "import os\nprint(sorted(map(int, os.listdir('/proc/self/fd')))[3:-1])"
    namespace = "if ctypes.CDLL(None).unshare(0x10000000) < 0: raise OSError"
    forks = "for _ in range(100):\n    if os.fork() == 0:\n        import time\n        time.sleep(60)"
    return [
        _Try("no network", _try(f"socket.create_connection(('127.0.0.1', {port}), 2)"), refused),
        _Try("no files of this machine", _try(f"open({secret_path!r})"), refused),
        _Try("no writes outside the scratch folder", _try("open(os.__file__, 'a')"), refused),
        _Try("no view of other processes", processes, _prints("1")),
        _Try("no environment of this process", "import os\nprint(*os.environ)", _has_known_environment),
        _Try("no inherited descriptors", descriptors, _prints("[]")),
        _Try("no privileges", privileges, _prints("['']")),
        _Try("no new user namespaces", _try(namespace), refused),
        _Try("memory is limited", "x = b'x' * (1 << 30)", _ends("out_of_memory")),
        _Try("processes are limited", _try(forks), lambda outcome: "done" not in outcome.stdout),
        _Try("files are limited", _try("open('big', 'wb').write(b'x' * (64 << 20))"), refused),
        _Try("output is limited", "while True: print('x' * 1000)", _ends("too_much_output")),
        _Try("time is limited", "import time\ntime.sleep(60)", _ends("timed_out"), _SHORT),
    ]  # fmt: skip


def examine(config: SandboxConfig) -> Examination:
    """Try every kind of isolation, then every property of the one that is used."""
    kinds = tuple(_examine_kind(kind, config) for kind in _KINDS)
    with Sandbox(config) as sandbox:
        try:
            isolation = sandbox.start()
        except SandboxUnavailable as error:
            return Examination("", str(error).splitlines()[0], kinds, (), 0.0, tuple(remedies()))
        properties = _examine_properties(sandbox)
        milliseconds = _time(sandbox)
    is_safe = all(each.holds for each in properties)
    return Examination(isolation, "", kinds, properties, milliseconds, () if is_safe else tuple(remedies()))


def _examine_kind(kind: Kind, config: SandboxConfig) -> SandboxFinding:
    try:
        start(kind, config).close()
    except (ZygoteLost, CellLost) as error:
        return SandboxFinding(kind, False, complaint(kind, str(error)))
    return SandboxFinding(kind, True, "works")


def _examine_properties(sandbox: Sandbox) -> tuple[SandboxFinding, ...]:
    found = []
    with tempfile.NamedTemporaryFile() as secret, socket.create_server(("127.0.0.1", 0)) as server:
        for each in _tries(secret.name, server.getsockname()[1]):
            outcome = sandbox.run(each.code, limits=each.limits)
            told = (outcome.detail or outcome.stdout or outcome.stderr).strip()[-200:]
            found.append(SandboxFinding(each.name, each.is_held(outcome), told))
    return tuple(found)


def _time(sandbox: Sandbox) -> float:
    times = []
    for _ in range(_NUM_TIMED):
        began = time.perf_counter()
        sandbox.run("assert 1 + 1 == 2")
        times.append(time.perf_counter() - began)
    return 1000 * sorted(times)[_NUM_TIMED // 2]
