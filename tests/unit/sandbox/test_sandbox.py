"""What a run of code returns, sessions, and what happens when something dies. Real processes, no mocks."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from patience import long_enough

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox import Limits, Program, Sandbox, SandboxUnavailable, isolation, launch
from headwater.sandbox.cell_link import CellLost
from headwater.sandbox.inside.confine import Bounds
from headwater.sandbox.pool import CellPool
from headwater.sandbox.zygote_process import ZygoteProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox isolates only on Linux")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(SandboxConfig(max_concurrent=4, timeout_s=120.0))  # the machine may be busy
    try:
        sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(f"NO SANDBOX ON THIS MACHINE: {error}")
    yield sandbox
    sandbox.close()


def zygote_of(sandbox: Sandbox) -> ZygoteProcess:
    zygote = sandbox._pool._zygote
    assert zygote is not None
    return zygote


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("print('hi')", "ok", 0),
        ("raise SystemExit", "ok", 0),
        ("exit()", "ok", 0),
        ("raise SystemExit(3)", "failed", 3),
        ("import sys; sys.exit('no')", "failed", 1),
        ("1 / 0", "failed", 1),
        ("x = (", "failed", 1),
        ("import os; os._exit(7)", "failed", 7),
        ("import ctypes; ctypes.string_at(0)", "killed", -signal.SIGSEGV),
        ("raise MemoryError", "out_of_memory", 1),
        ("x = bytearray(1 << 40)", "out_of_memory", 1),
    ],
)
def test_every_ending_has_its_status(sandbox: Sandbox, code: str, status: str, exit_code: int):
    outcome = sandbox.run(code)
    assert (outcome.status, outcome.exit_code) == (status, exit_code), outcome
    assert outcome.is_ok == (status == "ok")
    assert outcome.seconds > 0


def test_an_exception_names_the_line_of_the_code(sandbox: Sandbox):
    outcome = sandbox.run("def half(x):\n    return x / 0\n\nhalf(3)\n")
    assert outcome.stderr.splitlines()[1:5] == [
        '  File "/tmp/work/main.py", line 4, in <module>',
        "    half(3)",
        '  File "/tmp/work/main.py", line 2, in half',
        "    return x / 0",
    ]
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_program_gets_its_input_and_files(sandbox: Sandbox):
    code = "import helper, sys\nprint(helper.double(int(input())), sys.stdin.read(), open('data/x.bin', 'rb').read())"
    files = {"helper.py": "def double(x): return 2 * x", "data/x.bin": b"\0\xff"}
    outcome = sandbox.run(code, stdin="21\nrest é", files=files)
    assert outcome.stdout == "42 rest é b'\\x00\\xff'\n", outcome
    for name in ("/etc/passwd", "../x", "a/../../x", "", "a\0b"):
        with pytest.raises(ValueError, match="below the working folder"):
            sandbox.run("", files={name: ""})


def test_a_program_behaves_as_a_script(sandbox: Sandbox):
    code = """
import atexit, inspect, multiprocessing, subprocess, sys, threading
def square(x): return x * x
if __name__ == "__main__":
    atexit.register(print, "bye")
    with multiprocessing.Pool(2) as pool: print(pool.map(square, [1, 2, 3]))
    print(inspect.getsource(square).strip(), sys.argv)
    print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True).stdout)
    threading.Timer(0.2, print, ("from a thread",)).start()
"""
    outcome = sandbox.run(code)
    assert outcome.status == "ok", outcome
    assert outcome.stdout == (
        "[1, 4, 9]\ndef square(x): return x * x ['/tmp/work/main.py']\n1\n\nfrom a thread\nbye\n"
    ), outcome


def test_limits_of_one_run_replace_those_of_the_settings(sandbox: Sandbox):
    def check(limit_s: float) -> None:
        code = "import time; print('begun', flush=True); time.sleep(600)"
        outcome = sandbox.run(code, limits=Limits(timeout_s=limit_s))
        assert (outcome.status, outcome.detail, outcome.stdout) == ("timed_out", f"more than {limit_s:g} s", "begun\n")

    long_enough(check, 0.5, 10.0)
    outcome = sandbox.run("while True: pass", limits=Limits(cpu_s=0.2))
    assert (outcome.status, outcome.detail) == ("timed_out", "more than 0.2 s of processor time")
    outcome = sandbox.run("print('x' * 3000)", limits=Limits(max_output_kib=1))
    assert (outcome.status, outcome.is_cut, len(outcome.stdout)) == ("ok", True, 1024)
    for values in ({"timeout_s": 0.0}, {"memory_mib": -1}, {"cpu_s": float("inf")}):
        with pytest.raises(ValueError, match="must be a positive number"):
            Limits(**values)


def test_programs_run_side_by_side_and_keep_their_order(sandbox: Sandbox):
    outcomes = sandbox.run_many([Program(f"print({number})") for number in range(20)])
    assert [int(each.stdout) for each in outcomes] == list(range(20))
    assert sandbox.run_many([]) == []


def test_a_session_keeps_variables_files_and_imports(sandbox: Sandbox):
    async def talk() -> None:
        async with sandbox.session() as session:
            assert (await session.run("import math\nx = 6\nopen('f', 'w').write('kept')")).status == "ok"
            assert (await session.run("x * 7")).stdout == "42\n"
            assert (await session.run("print(open('f').read(), math.pi > 3)")).stdout == "kept True\n"
            failed = await session.run("x = 7\nx / 0")
            assert (failed.status, failed.lost_state) == ("failed", False)
            assert 'File "<session>", line 2' in failed.stderr
            assert (await session.run("x")).stdout == "7\n"
            assert (await session.run("def f(:")).stderr.endswith("SyntaxError: invalid syntax\n")
            ended = await session.run("exit(3)")
            assert (ended.status, ended.exit_code) == ("failed", 3)
            assert (await session.run("x")).stdout == "7\n"
        with pytest.raises(RuntimeError, match="closed"):
            await session.run("1")

    asyncio.run(talk())


def test_a_session_survives_a_time_limit_if_its_code_stops(sandbox: Sandbox):
    async def talk(limit_s: float) -> None:
        async with sandbox.session(Limits(timeout_s=limit_s)) as session:
            await session.run("x = 1")
            slow = await session.run("while True: pass")
            assert slow.status == "timed_out"
            if not slow.lost_state:
                assert (await session.run("x")).stdout == "1\n"
            await session.run("x = 2")
            deaf = await session.run(
                "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)"
            )
            assert (deaf.status, deaf.lost_state) == ("timed_out", True)
            assert "NameError" in (await session.run("x")).stderr
            dead = await session.run("import os; os._exit(0)")
            assert (dead.status, dead.lost_state) == ("ok", True)
        async with sandbox.session(Limits(memory_mib=64)) as session:
            bomb = await session.run("x = [b'x' * (1 << 20) for _ in range(10_000)]")
            assert bomb.status == "out_of_memory"

    long_enough(lambda limit_s: asyncio.run(talk(limit_s)), 1.0, 8.0)


def test_code_that_writes_to_the_connection_of_its_session_hurts_only_itself(sandbox: Sandbox):
    async def talk(message: str) -> None:
        async with sandbox.session(Limits(timeout_s=2.0)) as session:
            await session.run("x = 1")
            code = (
                f"import os, time\nfor fd in range(3, 64):\n    try: os.write(fd, {message})\n    except OSError: pass"
            )
            outcome = await session.run(code + "\ntime.sleep(0.2)")
            assert outcome.status in ("ok", "failed", "timed_out"), outcome
            await session.run("os.closerange(3, 64)")
        assert (await sandbox.arun("print(1)")).stdout == "1\n"

    messages = (
        "(1 << 29).to_bytes(4, 'big') + b'x' * 1000",  # announces more than is allowed
        "(9).to_bytes(4, 'big') + b'{\"x\": 1}'",
        '(60).to_bytes(4, \'big\') + b\'{"number": 2, "exit_code": "none", "ready": 0, "error": [] }\'.ljust(60)',
        "b'\\xff' * 100_000",
    )

    async def talk_at_once() -> None:
        await asyncio.gather(*map(talk, messages))

    asyncio.run(talk_at_once())


def test_a_session_uses_no_processor_time_between_runs(sandbox: Sandbox):
    async def talk() -> None:
        zygote = zygote_of(sandbox)._process.pid
        others = set(_descendants(zygote))
        async with sandbox.session() as session:
            await session.run("import threading\nn = 0\ndef count():\n    global n\n    while True: n += 1")
            await session.run("threading.Thread(target=count, daemon=True).start()")
            own = sorted(set(_descendants(zygote)) - others)
            assert own
            deadline = time.monotonic() + 60
            while not all(map(_is_stopped, own)):  # soon after each run, and until the next one
                assert time.monotonic() < deadline, "the session is not stopped"
                await asyncio.sleep(0.01)
            used = list(map(_processor_time, own))
            await asyncio.sleep(0.3)
            assert list(map(_processor_time, own)) == used
            assert int((await session.run("n")).stdout) > 0

    asyncio.run(talk())


def test_cancelling_while_the_interpreter_starts_does_not_disturb_the_next_run(sandbox: Sandbox, monkeypatch):
    started, go_on, make = threading.Event(), threading.Event(), CellPool.with_cell

    def make_late(self: CellPool, *arguments: Any) -> Any:
        cell = make(self, *arguments)
        if not started.is_set():
            started.set()
            assert go_on.wait(60)
        return cell

    async def cancel() -> None:
        async with sandbox.session() as session:
            first = asyncio.create_task(session.run("print('too late')"))
            assert await asyncio.to_thread(started.wait, 60)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            second = asyncio.create_task(session.run("x = 1"))
            await asyncio.sleep(0.1)
            go_on.set()  # from here on, the first one ends its own interpreter and not that of the second
            assert (await second).status == "ok"
            for _ in range(3):
                assert (await session.run("x")).stdout == "1\n"
                await asyncio.sleep(0.1)

    monkeypatch.setattr(CellPool, "with_cell", make_late)
    asyncio.run(cancel())


def test_cancelling_ends_the_program(sandbox: Sandbox):
    async def cancel() -> None:
        running = [asyncio.create_task(sandbox.arun("import time; time.sleep(1000)")) for _ in range(8)]
        async with sandbox.session() as session:
            await session.run("x = 1")
            await asyncio.sleep(0.3)
            for each in running:
                each.cancel()
            results = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in results)
            slow = asyncio.create_task(session.run("import time; time.sleep(1000)"))
            await asyncio.sleep(0.2)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            assert "NameError" in (await session.run("x")).stderr

    asyncio.run(cancel())
    assert sandbox.run("print(1)").stdout == "1\n"


def test_a_zygote_that_dies_is_replaced(sandbox: Sandbox):
    os.killpg(zygote_of(sandbox)._process.pid, signal.SIGKILL)
    assert sandbox.run("print(1)").stdout == "1\n"


def test_nothing_survives_its_owner(tmp_path: Path):
    """A killed owner takes the zygote, programs and sessions with it."""
    script = tmp_path / "owner.py"
    script.write_text(
        "import asyncio, threading, time\n"
        "from headwater.sandbox import Sandbox\n"
        "from headwater.config.rollout_schema import SandboxConfig\n"
        "sandbox = Sandbox(SandboxConfig(max_concurrent=2))\n"
        "sandbox.start()\n"
        "threading.Thread(target=sandbox.run, args=('import time; time.sleep(1000)',), daemon=True).start()\n"
        "session = sandbox.session()\n"
        "asyncio.run(session.run('x = 1'))\n"
        "print(sandbox._pool._zygote._process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    line = owner.stdout.readline()
    if not line:
        pytest.skip("NO SANDBOX ON THIS MACHINE")
    zygote = int(line)
    deadline = time.monotonic() + 60
    while len(family := [zygote, *_descendants(zygote)]) < 3:  # the program begins in another thread
        assert time.monotonic() < deadline, family
        time.sleep(0.05)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 60
    while left := [each for each in family if _is_running(each)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.05)


def _descendants(root: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{root}/task").glob("*/children"):
        with suppress(OSError):  # it may end while it is read
            for child in map(int, path.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _is_running(process: int) -> bool:
    try:
        return _state(process) != "Z"
    except OSError:
        return False


def _state(process: int) -> str:
    return _stat(process)[0]


def _is_stopped(process: int) -> bool:
    """All threads: one that waited for a processor stops when it gets one."""
    threads = Path(f"/proc/{process}/task").glob("*/stat")
    return all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in threads)


def _processor_time(process: int) -> tuple[str, str]:
    return _stat(process)[11], _stat(process)[12]


def _stat(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _run_in_fork(sandbox: Sandbox, answers: multiprocessing.Queue[str]) -> None:
    answers.put(sandbox.run("print('forked')").stdout)
    sandbox.close()


def test_a_forked_process_gets_its_own_zygote(sandbox: Sandbox):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_run_in_fork, args=(sandbox, answers))
    child.start()
    assert answers.get(timeout=120) == "forked\n"
    child.join(60)
    assert child.exitcode == 0
    assert sandbox.run("print(1)").stdout == "1\n"


def test_isolation_for_one_program_each(monkeypatch: pytest.MonkeyPatch):
    """Where processes in the sandbox may not make namespaces, every program gets its own bubblewrap."""
    monkeypatch.setitem(isolation._CANDIDATES, "bubblewrap", ("bubblewrap-single",))
    with Sandbox(SandboxConfig(isolation="bubblewrap")) as sandbox:
        try:
            assert sandbox.start() == "bubblewrap-single"
        except SandboxUnavailable as error:
            pytest.skip(f"bubblewrap does not work here: {error}")
        monkeypatch.setattr(isolation, "_probe", None)  # it has worked, so later programs do not test it again
        looks = "import os\nprint(os.getuid(), os.path.exists('/tmp/left'), os.path.exists('/dev/shm/left'))\n"
        leaves = "open('/tmp/left', 'w'); open('/dev/shm/left', 'w')\nif os.fork() == 0:\n    while True: pass\n"
        for _ in range(2):
            assert sandbox.run(looks + leaves).stdout == "1000 False False\n"
        assert sandbox.run("import os\nos.kill(-1, 9)").status in ("killed", "ok", "failed")
        assert sandbox.run("1 / 0").status == "failed"
        assert sandbox.run("b'x' * (1 << 40)").status == "out_of_memory"
        assert sandbox.run_tests("def f(): return 1", "assert f() == 1").status == "ok"
        assert sandbox.run_tests("import os; os.kill(-1, 9)", "assert f() == 1").status != "ok"

        async def talk() -> None:
            async with sandbox.session() as session:
                await session.run("x = 1")
                assert (await session.run("x")).stdout == "1\n"

        asyncio.run(talk())


def test_isolation_for_one_program_each_is_tested_too(monkeypatch: pytest.MonkeyPatch):
    def fail(zygote: object) -> None:
        raise CellLost("a test program ended with failed")

    monkeypatch.setitem(isolation._CANDIDATES, "bubblewrap", ("bubblewrap-single",))
    monkeypatch.setattr(isolation, "_probe", fail)
    with Sandbox(SandboxConfig(isolation="bubblewrap")) as sandbox, pytest.raises(SandboxUnavailable, match="single"):
        sandbox.start()


def test_unprotected_says_so_and_cleans_up(caplog: pytest.LogCaptureFixture):
    isolation._warned.clear()
    with Sandbox(SandboxConfig(isolation="unprotected")) as sandbox:
        outcome = sandbox.run(
            "import os\nprint(os.getcwd())\nif os.fork() == 0:\n    os.setsid()\n    while True: pass"
        )
        assert outcome.status == "ok"
        assert not Path(outcome.stdout.strip()).exists()
        assert _descendants(zygote_of(sandbox)._process.pid) == []
        assert "PYTHONPATH" not in sandbox.run("import os; print(os.environ)").stdout
        assert sandbox.run("while True: pass", limits=Limits(cpu_s=0.3)).status == "timed_out"
    assert "with the rights of this process" in caplog.text


def test_without_isolation_code_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(launch, "PLACES", "/nowhere")
    monkeypatch.setitem(launch.ENVIRONMENT, "PATH", "/nowhere")
    with Sandbox(SandboxConfig(isolation="bubblewrap")) as sandbox, pytest.raises(SandboxUnavailable) as refused:
        sandbox.run("print(1)")
    message = str(refused.value)
    assert "sandbox.isolation = bubblewrap" in message
    assert "bwrap is not installed" in message
    assert "apt install bubblewrap" in message
    assert "sandbox.isolation=unprotected" in message


def test_preloaded_modules_are_there_at_once(sandbox: Sandbox):
    code = "import sys\nprint('colorsys' in sys.modules)"
    assert sandbox.run(code).stdout == "False\n"
    with Sandbox(SandboxConfig(preload=("colorsys",))) as other:
        assert other.run(code).stdout == "True\n"
    with Sandbox(SandboxConfig(preload=("no_such_module",))) as other, pytest.raises(SandboxUnavailable) as refused:
        other.run(code)
    assert "No module named 'no_such_module'" in str(refused.value)


def test_a_closed_sandbox_says_so():
    sandbox = Sandbox(SandboxConfig())
    sandbox.close()
    with pytest.raises(SandboxUnavailable, match="closed"):
        sandbox.run("1")


def test_every_limit_comes_from_the_settings():
    settings = SandboxConfig(
        memory_mib=64, cpu_s=1.5, timeout_s=2.5, max_processes=3, max_file_mib=4, max_output_kib=5, max_concurrent=6
    )
    assert Limits().bounds(settings) == Bounds(64 << 20, 1.5, 2.5, 3, 4 << 20, 5 << 10)
    with Sandbox(settings) as sandbox:
        assert sandbox.max_concurrent == 6
