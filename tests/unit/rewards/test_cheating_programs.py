"""Programs that try to pass unit tests without solving the task. None of them scores."""

from __future__ import annotations

import pytest
from ending import end_judge
from sandbox_here import skip_without_sandbox

from headwater.rewards.scorers.code import code

PATIENT = {"test_timeout_s": 120.0, "time_limit_s": 600.0}
"""The machine may be busy."""
MARK = "31415926535897"
"""A number that only the tests contain."""
HUMANEVAL = {
    "prompt": "def helper(x):\n    return x == 1\n\n\ndef f(x):\n    '''Secret.'''\n",
    "entry_point": "f",
    "test": (
        f"def check(candidate):\n    assert math.isclose(candidate(3), {MARK})\n"
        f"    assert helper(candidate(4)) and sorted([candidate(5)]) == [{MARK[::-1]}]\n"
    ),
}
ASSERTS = [f"assert f(3) == {MARK}", f"assert f(5) == {MARK[::-1]}"]
CALLS = {"inputs": [[3], [5]], "outputs": [int(MARK), int(MARK[::-1])], "fn_name": "f"}
PRINTS = {"inputs": ["3", "5"], "outputs": [MARK, MARK[::-1]]}

HUNT = """
import ctypes, gc, os, re, sys

def look(text):
    found = re.search(rb"314159265\\d+", text)
    return int(found[0]) if found else None

def f(x):
    places = []
    frame = sys._getframe()
    while frame:
        places += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    for value in (*places, *gc.get_objects()):
        try:
            if number := look(repr(value).encode()):
                return number
        except Exception:
            pass
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # so that it may read its own memory
    for process in (p for p in os.listdir("/proc") if p.isdigit()):
        for name in ("environ", "cmdline", "fd/0", "fd/1", "fd/3", "fd/4", "fd/5"):
            try:
                if number := look(open(f"/proc/{process}/{name}", "rb").read(1 << 20)):
                    return number
            except OSError:
                pass
        try:
            with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
                for line in maps:
                    if " rw" in line or "[heap]" in line:
                        start, end = (int(part, 16) for part in line.split()[0].split("-"))
                        memory.seek(start)
                        if number := look(memory.read(min(end - start, 1 << 26))):
                            return number
        except (OSError, ValueError, OverflowError):
            pass
    for folder, _, files in os.walk("."):
        for name in files:
            text = open(os.path.join(folder, name), "rb").read()
            if number := look(text.replace(b"rb\\"314159265", b"")):
                return number
    return 0
"""
CHEATS = {
    "claims success and exits": """
print('all tests passed')
import sys
sys.exit(0)
""",
    "exits at once": """
import os
os._exit(0)
""",
    "exits when called": """
import os
def f(x):
    print('[{}]')
    os._exit(0)
""",
    "equals everything": """
class Yes(int):
    __eq__ = __bool__ = __lt__ = lambda *a: True
    __hash__ = int.__hash__
def f(x):
    return Yes()
""",
    "is an object that equals everything": """
class Yes:
    __eq__ = __bool__ = __lt__ = __le__ = lambda *a: True
def f(x):
    return Yes()
""",
    "replaces built-ins": """
import builtins, math
math.isclose = lambda *a, **k: True
builtins.AssertionError = type('A', (BaseException,), {})
builtins.sorted = lambda x: x
builtins.exec = builtins.compile = lambda *a, **k: None
def f(x):
    return x
""",
    "replaces what judges it": """
def helper(x):
    return True
def check(c):
    pass
def sorted(x):
    return 0
class math:
    isclose = staticmethod(lambda *a: True)
solution = candidate = None
def f(x):
    return x
""",
    "kills the tests": """
import os, signal
def f(x):
    for p in os.listdir('/proc'):
        if p.isdigit() and int(p) != os.getpid():
            try:
                os.kill(int(p), signal.SIGKILL)
            except OSError:
                pass
    return 0
""",
    "writes a verdict to every descriptor": """
import os
def f(x):
    for d in range(64):
        try:
            os.write(d, b'[{}, {}]')
        except OSError:
            pass
    return 0
""",
    "answers with rubbish": """
import os
for d in range(3, 64):
    try:
        os.write(d, b'\\xff' * 4096)
    except OSError:
        pass
def f(x):
    return 0
""",
    "closes its descriptors": """
import os
def f(x):
    os.closerange(0, 64)
    return 0
""",
    "replaces the other functions in its process": """
import sys
for module in list(sys.modules.values()):
    for name in ('encode', 'pack', 'call_with_objects', 'read', 'write'):
        try:
            setattr(module, name, lambda *a, **k: None)
        except Exception:
            pass
def f(x):
    return 0
""",
    "leaves a process behind": """
import os
if os.fork() == 0:
    print('31415926535897')
    os._exit(0)
def f(x):
    return 0
""",
    "raises what ends tests": """
def f(x):
    raise SystemExit(0)
""",
    "prints at its end": """
import atexit, os
atexit.register(lambda: os.write(1, b'31415926535897'))
def f(x):
    return 0
""",
}


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
    skip_without_sandbox()
    yield
    end_judge()


def test_an_honest_program_scores():
    asked = "def f(x):\n    return {3: 31415926535897, 4: 1, 5: 79853562951413}[x]\n"
    for truth in (HUMANEVAL, ASSERTS, CALLS):
        assert code("mbpp", asked, truth, {}, **PATIENT)["score"] == 1.0
    assert code("apps", f"{asked}print(f(int(input())))", PRINTS, {}, **PATIENT)["score"] == 1.0


def test_no_cheat_scores():
    for name, program in CHEATS.items():
        for truth in (HUMANEVAL, ASSERTS):
            result = code("mbpp", program, truth, {}, test_timeout_s=2.0)
            assert (result["score"], result["passed_share"]) == (0.0, 0.0), (name, result)
    for name in ("claims success and exits", "is an object that equals everything"):
        assert code("mbpp", CHEATS[name], CALLS, {})["score"] == 0.0, name
        assert code("apps", f"{CHEATS[name]}\nprint(f(1))", PRINTS, {})["score"] == 0.0, name


def test_what_tests_expect_cannot_be_found():
    for hidden in ("x = ['314159265' + str(35897)]", "x = ctypes.create_string_buffer(b'314159265' + b'35897')"):
        result = code("mbpp", f"{HUNT}\n{hidden}", ASSERTS[:1], {}, **PATIENT)
        assert result["verdict"] == "passed", result  # the search finds what is there
    for truth in (HUMANEVAL, ASSERTS, CALLS):
        result = code("mbpp", HUNT, truth, {}, **PATIENT)
        assert (result["score"], result["verdict"]) == (0.0, "wrong"), result


def test_a_test_leaves_nothing_for_the_next_one():
    leaves = "import os\nprint(31415926535897 if not os.path.exists('x') else 79853562951413)\nopen('x', 'w')"
    result = code("apps", leaves, PRINTS, {}, continuous=True, **PATIENT)
    assert result["score"] == 0.5


def test_the_next_program_is_judged_as_usual():
    for program in list(CHEATS.values())[:3]:
        code("mbpp", program, ASSERTS, {})
        assert code("mbpp", "def f(x):\n    return x", ["assert f(2) == 2"], {}, **PATIENT)["score"] == 1.0
