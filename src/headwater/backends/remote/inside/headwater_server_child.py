"""What the Python of a vLLM or SGLang environment runs: the program's server, which ends when standard input closes.

    python headwater_server_child.py vllm --model MODEL ...
    python headwater_server_child.py sglang --model-path MODEL ...

Headwater is not installed in that environment, so this file uses only the standard library. It chooses a free port,
adds the options that the program needs to serve a run, and prints one line when the server answers.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.metadata
import importlib.util
import os
import random
import re
import runpy
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
_STREAMS = "--incremental-streaming-output"
_POLL_S = 0.2
_STOP_LIMIT_S = 10.0
_HOST = os.environ.get("HEADWATER_CHILD_HOST", "127.0.0.1")
_KEY = os.environ.get("HEADWATER_CHILD_KEY", "")


class Guard:
    """Refuses every call without the server's key. vLLM's own option protects only some of its calls."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health" or self._is_known(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            kind = (b"content-type", b"application/json")
            await send({"type": "http.response.start", "status": 401, "headers": [kind]})
            await send({"type": "http.response.body", "body": b'{"error": "the API key is missing or wrong"}'})

    def _is_known(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {_KEY}".encode())


def main() -> None:
    program = sys.argv[1]
    if importlib.util.find_spec(program) is None:
        sys.exit(f"{sys.executable} has no package {program}; set rollout.launch.python to the Python that has it")
    port = _unused_port()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_announce, args=(port,), daemon=True).start()
    options = ["--host", _HOST, "--port", str(port), *(_vllm_options() if program == "vllm" else _sglang_options())]
    sys.argv[1:] = [*options, *sys.argv[2:]]
    runpy.run_module(_MODULES[program], run_name="__main__", alter_sys=True)


def _vllm_options() -> list[str]:
    options = ["--worker-extension-cls", "headwater_vllm_worker.Worker"]
    if _KEY:
        options += ["--middleware", "headwater_server_child.Guard"]
    # Newer versions offer the interface for tokens only with this option; older ones do not know it.
    package = importlib.util.find_spec("vllm")
    assert package is not None, "checked"
    assert package.origin is not None, "vllm is a package with code"
    known = Path(package.origin).parent / "entrypoints" / "launchers" / "cli_args.py"
    if known.is_file() and "enable_scale_out" in known.read_text():
        options.append("--enable-scale-out")
    return options


def _sglang_options() -> list[str]:
    # Only this process sees its changed arguments. SGLang prints them, so Headwater removes the key from its output.
    options = ["--api-key", _KEY] if _KEY else []
    # Streams then have every token once. Older versions know the option by another name or repeat log-probs with it.
    if _version_of("sglang") >= (0, 5, 11) and _STREAMS not in sys.argv:
        options.append(_STREAMS)
    return options


def _version_of(program: str) -> tuple[int, ...]:
    """The first numbers of its version; empty if it is not an installed package."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return tuple(map(int, re.findall(r"\d+", importlib.metadata.version(program))[:3]))
    return ()


def _free_port(wanted: int = 0) -> int:
    with socket.socket(socket.AF_INET6 if ":" in _HOST else socket.AF_INET) as probe:
        probe.bind((_HOST, wanted))
        port: int = probe.getsockname()[1]
        return port


def _unused_port() -> int:
    """A free port that the system does not give to other programs meanwhile, as it does with those for clients.

    The server opens it much later, after imports, and SGLang after it has loaded the model.
    """
    first, last = 10_000, 32_768
    with contextlib.suppress(OSError, ValueError):
        last = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100 if first < last else 0):
        with contextlib.suppress(OSError):
            return _free_port(random.randrange(first, last))
    return _free_port()


def _announce(port: int) -> None:
    host = f"[{_HOST}]" if ":" in _HOST else _HOST
    url = f"http://{host}:{port}"
    while True:
        time.sleep(_POLL_S)
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/health", timeout=30):
            # Not sys.stdout: vLLM 0.23 puts its process id before every line that is printed there.
            os.write(1, f"\nthe server answers at {url}\n".encode())
            return


def _end_with_parent() -> None:
    """End all processes of this server when the pipe from the process that started it closes."""
    while os.read(0, 2**12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_LIMIT_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
