"""Attempts to get out of the sandbox: real programs, each of which prints ESCAPED if it gets what it wants.

Words in capitals between @ signs stand for things of the host, which the tests fill in: ports, paths, process ids.
"""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """\
import ctypes, os, signal, socket, stat, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(*what): print("ESCAPED", *what, flush=True)
def call(*numbers): return libc.syscall(*[ctypes.c_long(n) if isinstance(n, int) else n for n in numbers])
def refused(answer): return answer < 0
def write(path, text): os.write(os.open(path, os.O_WRONLY), text)
"""

NO_CONTENTS = ("ok", "failed")


@dataclass(frozen=True)
class Attempt:
    code: str
    statuses: tuple[str, ...] = NO_CONTENTS
    """How the program may end."""
    works_outside: bool = False
    """True if it gets what it wants without isolation, which shows that the attempt is a real one."""


def reads(path: str, works_outside: bool = False) -> Attempt:
    return Attempt(f"escaped(open({path!r}, 'rb').read()[:20])", works_outside=works_outside)


def syscall(numbers: dict[str, int], arguments: str) -> Attempt:
    """A system call through ctypes that must be refused."""
    return Attempt(f"number = {numbers!r}[os.uname().machine]\nif not refused(call(number, {arguments})): escaped()")


NETWORK = {
    "tcp to the host": Attempt("socket.create_connection(('127.0.0.1', @TCP@), 2); escaped()", works_outside=True),
    "tcp to the host over ipv6": Attempt("socket.create_connection(('::1', @TCP@), 2); escaped()"),
    "tcp to the internet": Attempt("socket.create_connection(('1.1.1.1', 53), 1); escaped()"),
    "udp to the host": Attempt(
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', @UDP@)); escaped()",
        works_outside=True,
    ),
    "name service": Attempt("print(socket.getaddrinfo('example.com', 80)); escaped()"),
    "unix socket in a folder": Attempt(
        "s = socket.socket(socket.AF_UNIX); s.connect('@FOLDER@/socket'); escaped()", works_outside=True
    ),
    "abstract unix socket": Attempt(
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0@ABSTRACT@'); escaped()", works_outside=True
    ),
    "raw socket": Attempt("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); escaped()"),
    "packet socket": Attempt("socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3); escaped()"),
    "netlink": Attempt("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); escaped()"),
    "socket of a virtual machine": Attempt("socket.socket(40, socket.SOCK_STREAM); escaped()"),
    "network interfaces": Attempt(
        "names = [n for n in os.listdir('/sys/class/net')] if os.path.exists('/sys/class/net') else []\n"
        "if [n for n in names if n != 'lo']: escaped(names)"
    ),
    "switch the loopback on": Attempt(
        "import fcntl, struct\ns = socket.socket()\nfcntl.ioctl(s, 0x8914, struct.pack('16sH14x', b'lo', 1)); escaped()"
    ),
}
READING = {
    "file in the home folder": reads("@FOLDER@/secret", works_outside=True),
    "shadow passwords": reads("/etc/shadow"),
    "users of the host": reads("/etc/passwd", works_outside=True),
    "run directory": Attempt("escaped(os.listdir('@FOLDER@'))", works_outside=True),
    "home folders": Attempt(
        "for home in ('/root', '/home'):\n"
        "    for path, _, names in os.walk(home):\n"
        "        if names and not path.startswith((sys.base_prefix, sys.prefix)): escaped(path, names[:3])"
    ),
    "environment": Attempt("if '@SECRET@' in str(os.environ): escaped()"),
    "environment of process 1": Attempt("if b'@SECRET@' in open('/proc/1/environ', 'rb').read(): escaped()"),
    "all processes": Attempt(
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    for name in ('environ', 'cmdline', 'maps'):\n"
        "        text = open(f'/proc/{pid}/{name}', 'rb').read()\n"
        "        if b'@SECRET@' in text or b'@FOLDER@' in text or b'pytest' in text: escaped(pid, name)",
    ),
    "number of processes": Attempt(
        "pids = list(filter(str.isdigit, os.listdir('/proc')))\nif len(pids) > 2: escaped(pids)", works_outside=True
    ),
    "root of a process": reads("/proc/self/root/../../@FOLDER@/secret", works_outside=True),
    "root of process 1": reads("/proc/1/root@FOLDER@/secret"),
    "paths with dots": reads("../../../../../../../../@FOLDER@/secret", works_outside=True),
    "symbolic link": Attempt("os.symlink('@FOLDER@/secret', 'link'); escaped(open('link').read())", works_outside=True),
    "hard link": Attempt("os.link('@FOLDER@/secret', 'link'); escaped()"),
    "inherited descriptors": Attempt(
        "for fd in range(3, 1024):\n    try: escaped(fd, os.fstat(fd))\n    except OSError: pass"
    ),
    "devices": Attempt(
        "known = {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'fd', 'stdin', 'stdout', 'stderr', 'shm', 'pts',"
        " 'ptmx', 'core', 'console'}\n"
        "if extra := set(os.listdir('/dev')) - known: escaped(extra)"
    ),
    "memory and disks": Attempt(
        "for name in ('mem', 'kmem', 'port', 'kmsg', 'sda', 'vda', 'nvme0n1', 'kvm', 'fuse', 'nvidia0'):\n"
        "    try: os.open('/dev/' + name, os.O_RDONLY); escaped(name)\n"
        "    except OSError: pass"
    ),
    "kernel settings": Attempt(
        "for path in ('/proc/kallsyms', '/proc/kcore', '/proc/cmdline', '/proc/modules', '/sys/kernel'):\n"
        "    if os.path.exists(path): escaped(path)",
        works_outside=True,
    ),
    "shared memory file of the host": reads("/dev/shm/@SHM@", works_outside=True),
    "mounts of the host": Attempt(
        "text = open('/proc/self/mountinfo').read()\nif '/sys/fs/cgroup' in text or '/home' in text: escaped(text)"
    ),
    "file by handle": syscall({"x86_64": 304, "aarch64": 265}, "-100, 0, 0"),
}
WRITING = {
    "folders of the system": Attempt(
        "for top in ['/'] + ['/' + name for name in os.listdir('/') if name not in ('tmp', 'proc')]:\n"
        "    for path, folders, _ in os.walk(top):\n"
        "        if path.count('/') > 3: folders.clear(); continue\n"
        "        if path.startswith('/dev/shm') or path.startswith('/tmp'): continue\n"
        "        try: open(path + '/@MARK@', 'w').close(); escaped(path)\n"
        "        except OSError: pass"
    ),
    "standard library": Attempt("open(os.__file__, 'a').write('#'); escaped()"),
    "module beside the standard library": Attempt(
        "open(os.path.dirname(os.__file__) + '/@MARK@.py', 'w').close(); escaped()"
    ),
    "installed packages": Attempt(
        "for path in sys.path:\n"
        "    if 'site-packages' in path: open(path + '/@MARK@.py', 'w').close(); escaped(path)\n"
        "raise SystemExit(1)"
    ),
    "the sandbox itself": Attempt("open('/opt/headwater/zygote.py', 'a').write('#'); escaped()"),
    "host folder": Attempt("open('@FOLDER@/@MARK@', 'w').close(); escaped()", works_outside=True),
    "mode of a program": Attempt("os.chmod('/usr/bin/env', 0o4777); escaped()"),
    "owner of a file": Attempt("open('f', 'w').close(); os.chown('f', 0, 0); escaped()"),
    "host name": Attempt("socket.sethostname('broken'); escaped()"),
    "kernel setting": Attempt("write('/proc/sys/kernel/hostname', b'broken'); escaped()"),
    "clock": Attempt("time.clock_settime(time.CLOCK_REALTIME, 0); escaped()"),
    "block device": Attempt("os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0)); escaped()"),
    "own limits of processes": Attempt(
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000)); escaped()"
    ),
    "own limit of memory": Attempt("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1)); escaped()"),
    "out of memory score": Attempt("write('/proc/self/oom_score_adj', b'-1000'); escaped()"),
    "mapping of users": Attempt("write('/proc/self/uid_map', b'0 0 1'); escaped()"),
}
KERNEL = {
    "mount": Attempt("if not refused(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)): escaped()"),
    "mount writable": Attempt("if not refused(libc.mount(b'none', b'/', None, 32 | 4096, None)): escaped()"),
    "unmount": Attempt("if not refused(libc.umount2(b'/tmp', 2)): escaped()"),
    "new mount interface": syscall({"x86_64": 430, "aarch64": 430}, "b'tmpfs', 0"),
    "open a tree of mounts": syscall({"x86_64": 428, "aarch64": 428}, "-100, b'/', 1"),
    "change root": Attempt("os.chroot('/tmp'); escaped()"),
    "pivot root": syscall({"x86_64": 155, "aarch64": 41}, "b'/tmp', b'/tmp'"),
    "nested user namespace": Attempt("if not refused(libc.unshare(0x10000000)): escaped()"),
    "nested user namespace by clone": Attempt(
        "answer = call({'x86_64': 56, 'aarch64': 220}[os.uname().machine], 0x10000000 | 17, 0, 0, 0, 0)\n"
        "if answer == 0: os._exit(0)\n"
        "if answer > 0: escaped()"
    ),
    "nested user namespace by clone3": Attempt(
        "arguments = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17)\n"
        "answer = call(435, ctypes.byref(arguments), 64)\n"
        "if answer == 0: os._exit(0)\n"
        "if answer > 0: escaped()"
    ),
    "enter a namespace": Attempt(
        "fd = os.open('/proc/1/ns/mnt', os.O_RDONLY)\nif not refused(libc.setns(fd, 0)): escaped()"
    ),
    "trace a process": Attempt(
        "pid = os.fork()\nif pid == 0: time.sleep(5); os._exit(0)\n"
        "if not refused(libc.ptrace(16, pid, None, None)): escaped()"
    ),
    "read another process": syscall({"x86_64": 310, "aarch64": 270}, "os.getpid(), 0, 0, 0, 0, 0"),
    "keyring": syscall({"x86_64": 248, "aarch64": 217}, "b'user', b'name', b'value', 5, -3"),
    "session keyring": syscall({"x86_64": 250, "aarch64": 219}, "1, 0"),
    "bpf": syscall({"x86_64": 321, "aarch64": 280}, "0, 0, 0"),
    "page faults in user space": syscall({"x86_64": 323, "aarch64": 282}, "1"),
    "performance events": syscall({"x86_64": 298, "aarch64": 241}, "b'\\0' * 128, 0, -1, -1, 0"),
    "io_uring": syscall({"x86_64": 425, "aarch64": 425}, "8, b'\\0' * 128"),
    "memory without a limit": Attempt("os.memfd_create('hidden'); escaped()", works_outside=False),
    "kernel module": syscall({"x86_64": 175, "aarch64": 105}, "0, 0, b''"),
    "reboot": syscall({"x86_64": 169, "aarch64": 142}, "0xfee1dead, 672274793, 0x1234567"),
    "calls of another interface": Attempt(
        "if os.uname().machine == 'x86_64' and not refused(call(0x40000000 | 39)): escaped()"
    ),
    "become root": Attempt(
        "for change in (os.setuid, os.setgid, os.seteuid, os.setegid):\n"
        "    try: change(0); escaped(change)\n"
        "    except OSError: pass"
    ),
    "setuid program": Attempt(
        "for name in ('su', 'mount', 'passwd', 'sudo', 'newgrp'):\n"
        "    path = '/usr/bin/' + name\n"
        "    if os.path.exists(path):\n"
        "        done = subprocess.run([path, '-c', 'id -u'], capture_output=True, stdin=subprocess.DEVNULL)\n"
        "        if done.stdout.strip() == b'0': escaped(name)"
    ),
    "capabilities": Attempt(
        "for line in open('/proc/self/status'):\n"
        "    if line.startswith(('CapEff', 'CapPrm')) and int(line.split()[1], 16): escaped(line)"
    ),
    "privileges of programs": Attempt("if 'NoNewPrivs:\\t1' not in open('/proc/self/status').read(): escaped()"),
    "shared memory of System V": syscall({"x86_64": 29, "aarch64": 194}, "@KEY@, 4096, 0o666"),
    "messages of System V": syscall({"x86_64": 68, "aarch64": 186}, "@KEY@, 0o1666"),
    "semaphores of System V": syscall({"x86_64": 64, "aarch64": 190}, "@KEY@, 1, 0o1666"),
    "message queue": syscall({"x86_64": 240, "aarch64": 180}, "b'queue', 0o102, 0o666, 0"),
    "terminal": Attempt("fd = os.open('/dev/tty', os.O_RDWR); escaped()"),
}
SIGNALS = {
    "kill everything": Attempt("os.kill(-1, signal.SIGKILL); time.sleep(0.1)", ("ok", "failed", "killed")),
    "kill the parent": Attempt(
        "pid = os.getppid()\nif pid > 0: os.kill(pid, signal.SIGKILL)\nos.kill(0, signal.SIGTERM)",
        ("ok", "failed", "killed"),
    ),
    "kill a process of the host": Attempt("os.kill(@VICTIM@, 0); escaped()", works_outside=True),
    "kill all numbers": Attempt(
        "for pid in range(2, 5000):\n    try: os.kill(pid, signal.SIGKILL); escaped(pid)\n    except OSError: pass"
    ),
    "stop the group": Attempt("os.killpg(0, signal.SIGSTOP); time.sleep(0.1)", ("ok", "timed_out")),
    "crash": Attempt("ctypes.string_at(0)", ("killed",)),
    "abort": Attempt("os.abort()", ("killed",)),
}
RESOURCES = {
    "fork bomb": Attempt(
        "while True:\n    try: os.fork()\n    except OSError: pass",
        ("timed_out", "killed", "out_of_memory"),
    ),
    "number of processes a program gets": Attempt(
        "for number in range(200):\n    if os.fork() == 0: time.sleep(30); os._exit(0)\nescaped()",
        ("failed", "killed"),
    ),
    "thread bomb": Attempt(
        "for number in range(500): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\nescaped()",
        ("failed", "killed", "out_of_memory"),
    ),
    "memory in one process": Attempt("x = b'x' * (1 << 30)\nescaped()", ("out_of_memory",)),
    "memory in small pieces": Attempt("kept = []\nwhile True: kept.append(b'x' * (1 << 20))", ("out_of_memory",)),
    "memory in many processes": Attempt(
        "for number in range(8):\n"
        "    if os.fork() == 0: x = b'x' * (40 << 20); time.sleep(30); os._exit(0)\n"
        "time.sleep(30)",
        ("out_of_memory",),
    ),
    "mapped memory": Attempt(
        "import mmap\nx = mmap.mmap(-1, 1 << 30)\nfor place in range(0, 1 << 30, 4096): x[place] = 1\nescaped()",
        ("failed", "out_of_memory"),
    ),
    "mapped memory that is let go": Attempt(
        "import mmap\n"
        "for number in range(12):\n"
        "    if os.fork() == 0:\n"
        "        x = mmap.mmap(-1, 40 << 20)\n"
        "        for place in range(0, 40 << 20, 4096): x[place] = 1\n"
        "        x.madvise(mmap.MADV_DONTNEED); time.sleep(30); os._exit(0)\n"
        "time.sleep(30)",
        ("out_of_memory",),
    ),
    "locked memory": Attempt("if not refused(libc.mlockall(3)): escaped()"),
    "disk": Attempt(
        "with open('big', 'wb', buffering=0) as file:\n"
        "    for number in range(200): file.write(b'x' * (1 << 20))\n"
        "escaped()",
        ("failed",),
    ),
    "many files": Attempt(
        "for number in range(200): open(f'f{number}', 'wb').write(b'x' * (1 << 20))\nescaped()", ("failed",)
    ),
    "shared memory folder": Attempt(
        "for number in range(200): open(f'/dev/shm/f{number}', 'wb').write(b'x' * (1 << 20))\nescaped()", ("failed",)
    ),
    "inodes": Attempt(
        "for number in range(100_000): os.close(os.open(f'f{number}', os.O_CREAT | os.O_WRONLY))\nescaped()",
        ("failed",),
    ),
    "sparse file": Attempt("open('big', 'wb').truncate(1 << 40); escaped()", ("failed",)),
    "descriptors": Attempt("kept = [os.open('/dev/null', 0) for number in range(5000)]\nescaped()", ("failed",)),
    "flood of output": Attempt("while True: os.write(1, b'x' * 65536)", ("too_much_output",)),
    "flood of errors": Attempt("while True: os.write(2, b'x' * 65536)", ("too_much_output",)),
    "flood from many processes": Attempt(
        "for number in range(4): os.fork()\nwhile True: os.write(1, b'x' * 65536)", ("too_much_output",)
    ),
    "endless sleep": Attempt("time.sleep(1e6)", ("timed_out",)),
    "endless loop": Attempt("while True: pass", ("timed_out",)),
    "endless loop in a call": Attempt("sum(range(10 ** 15))", ("timed_out",)),
    "ignored signals": Attempt(
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: time.sleep(1)",
        ("timed_out",),
    ),
    "processor time in many processes": Attempt("for number in range(3): os.fork()\nwhile True: pass", ("timed_out",)),
    "daemon": Attempt(
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "        while True: time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "time.sleep(0.05)",
        ("ok",),
    ),
    "thread that does not end": Attempt("threading.Thread(target=time.sleep, args=(1000,)).start()", ("timed_out",)),
    "exit that does not end": Attempt("import atexit\natexit.register(time.sleep, 1000)", ("timed_out",)),
}
ATTEMPTS = NETWORK | READING | WRITING | KERNEL | SIGNALS | RESOURCES

FORGERIES = {
    "exits before the tests": "import os; os._exit(0)",
    "exits in a call": "import os\ndef answer(): os._exit(0)",
    "raises SystemExit in a call": "def answer(): raise SystemExit(0)",
    "calls exit": "def answer(): exit(0)",
    "is equal to everything": (
        "class Any:\n    def __eq__(self, other): return True\n    __ne__ = __lt__ = __gt__ = lambda s, o: False\n"
        "    def __hash__(self): return hash(42)\ndef answer(): return Any()"
    ),
    "returns a number that is equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\ndef answer(): return Any(7)"
    ),
    "returns text that is equal to everything": (
        "class Any(str):\n    def __eq__(self, other): return True\ndef answer(): return Any('x')"
    ),
    "replaces built-in functions": (
        "import builtins\nbuiltins.AssertionError = SystemExit\nbuiltins.abs = lambda x: 0\n"
        "def abs(x): return 0\ndef answer(): return 7"
    ),
    "registers an exit function": "import atexit, os\natexit.register(os._exit, 0)\ndef answer(): return 7",
    "writes to every descriptor": (
        "import os, json\nbody = json.dumps({'value': {'type': 'int', 'value': '2a'}, 'exit_code': 0}).encode()\n"
        "def answer():\n"
        "    for fd in range(3, 300):\n"
        "        try: os.write(fd, len(body).to_bytes(4, 'big') + body[:-2])\n"
        "        except OSError: pass\n"
        "    os._exit(0)"
    ),
    "closes every descriptor": "import os\nos.closerange(0, 1000)\ndef answer(): return 7",
    "kills the tests": "import os\ndef answer(): os.kill(1, 9); os.kill(os.getppid(), 9); os.kill(-1, 9)",
    "stops the tests": "import os, signal\ndef answer(): os.kill(os.getppid(), signal.SIGSTOP); return 7",
    "interrupts the tests": "import os, signal\ndef answer(): os.kill(os.getppid(), signal.SIGINT); return 7",
    "reads the tests from memory": (
        "import os, re\n"
        "def answer():\n"
        "    parent = os.getppid()\n"
        "    for line in open(f'/proc/{parent}/maps'):\n"
        "        start, end = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        if 'rw' in line:\n"
        "            with open(f'/proc/{parent}/mem', 'rb') as file:\n"
        "                file.seek(start)\n"
        "                found = re.search(rb'answer\\(\\) == (\\d+)', file.read(end - start))\n"
        "                if found: return int(found[1])"
    ),
    "finds the tests in its own memory": (
        "import re\n"
        "def answer():\n"
        "    for line in open('/proc/self/maps'):\n"
        "        start, end = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        if 'rw' in line:\n"
        "            with open('/proc/self/mem', 'rb') as file:\n"
        "                file.seek(start)\n"
        "                found = re.search(rb'answer\\(\\) == (\\d{9})', file.read(end - start))\n"
        "                if found: return int(found[1])\n"
        "    return 7"
    ),
    "looks for the tests in files": (
        "import os\n"
        "def answer():\n"
        "    for path, _, names in os.walk('/tmp'):\n"
        "        for name in names:\n"
        "            text = open(os.path.join(path, name)).read()\n"
        "            if 'answer() == ' in text and 'walk' not in text: return int(text.split(' == ')[1][:9])\n"
        "    return 7"
    ),
    "writes to the output of the tests": (
        "import os\n"
        "def answer():\n"
        "    for path in (f'/proc/{os.getppid()}/fd/1', '/proc/1/fd/1', '/proc/self/fd/1'):\n"
        "        try: open(path, 'w').write('passed\\n')\n"
        "        except OSError: pass\n"
        "    return 7"
    ),
    "prints that the tests passed": "print('passed', flush=True)\ndef answer(): print('passed', flush=True); return 7",
    "puts a module where the tests might find it": (
        "for name in ('math', 'json', 'sitecustomize', 'answer'):\n"
        "    open(f'{name}.py', 'w').write('import os; os._exit(0)')\n"
        "def answer(): return 7"
    ),
    "returns an endless iterator": "import itertools\ndef answer(): return itertools.count()",
    "returns a gigantic value": "def answer(): return 'x' * (1 << 28)",
    "returns a deep value": "def answer():\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    "returns itself": "def answer():\n    x = []; x.append(x)\n    return x",
    "never answers": "import time\ndef answer(): time.sleep(1000)",
    "does not define the function": "",
    "does not compile": "def answer(:",
    "lowers the limits of the tests": (
        "import os, resource\ndef answer(): resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0)); return 7"
    ),
    "traces the tests": (
        "import ctypes, os\n"
        "def answer(): return 42 if ctypes.CDLL(None).ptrace(16, os.getppid(), None, None) == 0 else 7"
    ),
}
"""Programs that do not know the answer, but want their tests to pass."""
