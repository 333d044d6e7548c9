"""Programs that try to get out of the sandbox, to hurt the machine, or to forge a result. None may succeed.

Every attempt runs with every isolation that works on this machine. Afterwards, the tests look at the host: no
connection came in, no file was changed, no process is left, and the sandbox still works.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sandbox_attempts import ATTEMPTS, FORGERIES, PRELUDE

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox import Limits, Sandbox, SandboxUnavailable

SHORT = Limits(timeout_s=0.5, cpu_s=0.4, memory_mib=96, max_processes=16, max_file_mib=16, max_output_kib=16)
"""For programs that use up the time that they get."""
LIMITS = Limits(timeout_s=60.0, cpu_s=20.0, memory_mib=96, max_processes=16, max_file_mib=16, max_output_kib=64)
BROKEN = ("NameError", "SyntaxError", "ImportError", "AttributeError", "TypeError", "IndentationError")
"""An attempt that ends with one of these did not try anything."""


class Host:
    """Things of this machine that programs try to reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = uuid.uuid4().hex
        self.mark = f"mark{uuid.uuid4().hex}"
        (folder / "secret").write_text(self.secret)
        self.shared = Path("/dev/shm") / f"headwater-test-{self.mark}"
        self.shared.write_text(self.secret)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.unix.listen()
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0{self.mark}")
        self.abstract.listen()
        for each in (self.tcp, self.udp, self.unix, self.abstract):
            each.setblocking(False)
        self.victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.key = 0x48570000 | (os.getpid() & 0xFFFF)
        self.hostname = socket.gethostname()
        self.contents = sorted(path.name for path in folder.iterdir())

    def fill(self, code: str) -> str:
        words = {
            "TCP": self.tcp.getsockname()[1], "UDP": self.udp.getsockname()[1], "ABSTRACT": self.mark,
            "FOLDER": self.folder, "SECRET": self.secret, "MARK": self.mark, "SHM": self.shared.name,
            "VICTIM": self.victim.pid, "KEY": self.key,
        }  # fmt: skip
        for word, value in words.items():
            code = code.replace(f"@{word}@", str(value))
        return code

    def check(self) -> None:
        """Nothing has reached this machine."""
        for name, server in (("tcp", self.tcp), ("unix", self.unix), ("abstract", self.abstract)):
            with contextlib.suppress(BlockingIOError):
                server.accept()
                pytest.fail(f"a connection came in: {name}")
        with contextlib.suppress(BlockingIOError):
            pytest.fail(f"a datagram came in: {self.udp.recv(100)!r}")
        assert (self.folder / "secret").read_text() == self.secret
        assert sorted(path.name for path in self.folder.iterdir()) == self.contents
        assert self.shared.read_text() == self.secret
        assert self.victim.poll() is None
        assert socket.gethostname() == self.hostname
        assert time.time() > 1_600_000_000

    def forget_visits(self) -> None:
        """After attempts without isolation: forget what they did."""
        for server in (self.tcp, self.unix, self.abstract):
            with contextlib.suppress(BlockingIOError):
                while True:
                    server.accept()[0].close()
        with contextlib.suppress(BlockingIOError):
            while True:
                self.udp.recv(100)
        (self.folder / self.mark).unlink(missing_ok=True)

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for each in (self.tcp, self.udp, self.unix, self.abstract):
            each.close()
        self.shared.unlink()


@dataclass(frozen=True)
class Isolated:
    name: str
    sandbox: Sandbox

    def processes(self) -> list[int]:
        """All processes of the sandbox but the zygote, as this machine sees them."""
        zygote = self.sandbox._pool._zygote
        assert zygote is not None
        below = descendants(zygote._process.pid)
        return below[1:] if self.name != "unprotected" else below  # the zygote is a child of what was started


def descendants(root: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if sys.platform != "linux":
        pytest.skip("the sandbox isolates only on Linux")
    os.environ["HEADWATER_TEST_SECRET"] = "set below"
    host = Host(tmp_path_factory.mktemp("host"))
    os.environ["HEADWATER_TEST_SECRET"] = host.secret
    yield host
    del os.environ["HEADWATER_TEST_SECRET"]
    host.close()


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces"])
def isolated(request: pytest.FixtureRequest, host: Host) -> Iterator[Isolated]:
    sandbox = Sandbox(SandboxConfig(isolation=request.param, max_concurrent=2, timeout_s=LIMITS.timeout_s))
    try:
        kind = sandbox.start()
    except SandboxUnavailable as error:
        warnings.warn(f"THE SANDBOX IS NOT TESTED WITH {request.param.upper()}: {error}", stacklevel=1)
        pytest.skip(f"{request.param} does not work on this machine: {error}")
    if kind != request.param:
        sandbox.close()
        warnings.warn(f"THE SANDBOX IS NOT TESTED WITH {request.param.upper()}: only {kind} works", stacklevel=1)
        pytest.skip(f"only {kind} works on this machine")
    yield Isolated(request.param, sandbox)
    sandbox.close()


def test_some_isolation_works_here():
    """Without isolation, code of a model is refused, and these tests test nothing. Say so loudly."""
    try:
        with Sandbox(SandboxConfig()) as sandbox:
            assert sandbox.run("print(1)").stdout == "1\n"
    except SandboxUnavailable as error:
        if sys.platform == "linux" and shutil.which("bwrap"):
            raise
        warnings.warn(f"NO SANDBOX ON THIS MACHINE: {error}", stacklevel=1)
        pytest.skip(str(error))


def test_there_are_many_attempts():
    assert len(ATTEMPTS) + len(FORGERIES) >= 100


@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_attempt_succeeds(isolated: Isolated, host: Host, name: str):
    attempt = ATTEMPTS[name]
    limits = SHORT if "timed_out" in attempt.statuses else LIMITS
    outcome = isolated.sandbox.run(PRELUDE + host.fill(attempt.code), limits=limits)
    assert "ESCAPED" not in outcome.stdout, outcome
    assert outcome.status in attempt.statuses, outcome
    complaint = outcome.stderr.strip().splitlines()[-1:]
    assert not any(line.startswith(BROKEN) for line in complaint), outcome
    host.check()
    wait_until_gone(isolated)
    assert isolated.sandbox.run("print(6 * 7)").stdout == "42\n"


def wait_until_gone(isolated: Isolated) -> None:
    """When a run has ended, its processes are gone; the machine may take a moment to collect them."""
    deadline = time.monotonic() + 300
    while left := isolated.processes():
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.01)


def test_attempts_are_real(host: Host):
    """Without isolation, the attempts that namespaces refuse do get what they want."""
    with Sandbox(SandboxConfig(isolation="unprotected")) as sandbox:
        for name, attempt in ATTEMPTS.items():
            if attempt.works_outside:
                outcome = sandbox.run(PRELUDE + host.fill(attempt.code), limits=LIMITS)
                assert "ESCAPED" in outcome.stdout, f"{name}: {outcome}"
    host.forget_visits()


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forgery_passes(isolated: Isolated, name: str):
    number = str(uuid.uuid4().int)[:9]
    tests = f"import math\nprint('begun', flush=True)\nassert answer() == {number}, 'wrong'\nprint('passed')"
    outcome = isolated.sandbox.run_tests(FORGERIES[name], tests, limits=SHORT)
    assert outcome.status != "ok", outcome
    assert "passed" not in outcome.stdout
    wait_until_gone(isolated)
    good = isolated.sandbox.run_tests(f"def answer(): return {number}", tests)
    assert good.status == "ok", good
    assert good.stdout == "begun\npassed\n"


def test_tests_are_secret_from_the_beginning(isolated: Isolated):
    """A descriptor of the tests' memory, opened before they arrive, would read them later: there is no such moment."""
    code = """
import os
opened = []
for _ in range(300):
    for name in ("mem", "fd", "maps", "environ"):
        try: opened.append(os.open(f"/proc/{os.getppid()}/{name}", os.O_RDONLY))
        except OSError: pass
def num_opened(): return len(opened)
"""
    for _ in range(5):
        outcome = isolated.sandbox.run_tests(code, "assert num_opened() == 0, num_opened()")
        assert outcome.status == "ok", outcome


def test_a_program_finds_nothing_of_another_one(isolated: Isolated):
    """Files, shared memory, sockets, processes and memory of one program are not there for the next one."""
    mark = uuid.uuid4().hex
    leaves = f"""
import os, socket, sys
for path in ("/tmp/left", "/dev/shm/left", os.path.expanduser("~/left"), "left"):
    open(path, "w").write("{mark}")
server = socket.socket(socket.AF_UNIX); server.bind("\\0left"); server.listen()
os.environ["LEFT"] = "{mark}"
import json; json.left = "{mark}"
print("{mark}" * 1000)
if os.fork() == 0:
    os.setsid()
    import time; time.sleep(1000)
"""
    half = len(mark) // 2
    looks = f"""
import json, os, socket
mark = "{mark[:half]}" + "{mark[half:]}"
for top in ("/tmp", "/dev/shm"):
    for path, _, names in os.walk(top):
        if "left" in names: print("file", path)
try:
    socket.socket(socket.AF_UNIX).connect("\\0left"); print("socket")
except OSError: pass
if "LEFT" in os.environ: print("environment")
if hasattr(json, "left"): print("module")
pids = [name for name in os.listdir("/proc") if name.isdigit()]
if len(pids) > 1: print("processes", pids)
wanted = mark.encode() * 2
for line in open("/proc/self/maps"):
    start, end = (int(x, 16) for x in line.split()[0].split("-"))
    if "rw" in line:
        with open("/proc/self/mem", "rb") as file:
            file.seek(start)
            if file.read(end - start).count(wanted) > 1: print("memory")
"""
    first = isolated.sandbox.run(leaves, limits=LIMITS)
    assert mark in first.stdout, first
    second = isolated.sandbox.run(looks, limits=LIMITS)
    assert (second.status, second.stdout) == ("ok", ""), second


def test_programs_side_by_side_do_not_meet(isolated: Isolated):
    """Two programs that run at the same time share no file, no port and no process."""
    from headwater.sandbox import Program

    code = """
import os, socket, sys, time
server = socket.socket(socket.AF_UNIX); server.bind("\\0meeting"); server.listen(); server.setblocking(False)
open("/tmp/meeting", "x").close()
open("/dev/shm/meeting", "x").close()
time.sleep(0.3)
print([name for name in os.listdir("/proc") if name.isdigit()])
"""
    outcomes = isolated.sandbox.run_many([Program(code)] * 4)
    assert [each.stdout for each in outcomes] == ["['1']\n"] * 4, outcomes


def test_shared_memory_of_the_host_is_out_of_reach(isolated: Isolated):
    """A System V segment of this machine, which any process could attach, has no name in the sandbox."""
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0x48571234, 4096, 0o1666)
    if segment < 0:
        pytest.skip("this machine has no System V shared memory")
    try:
        code = PRELUDE + "if libc.shmget(0x48571234, 4096, 0o666) >= 0: escaped()"
        assert "ESCAPED" not in isolated.sandbox.run(code).stdout
    finally:
        libc.shmctl(segment, 0, None)
