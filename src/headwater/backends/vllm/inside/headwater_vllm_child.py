"""What the Python of a vLLM environment runs: vLLM's server, which ends when its standard input closes.

Headwater is not installed in that environment, so this file uses only the standard library. It chooses a free port,
turns on the interface for tokens where that needs an option, adds Headwater's methods to the workers, and prints one
line when the server answers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

_SERVER = "vllm.entrypoints.openai.api_server"
_WORKER = "headwater_vllm_worker.Worker"
_POLL_S = 0.2
_STOP_LIMIT_S = 10.0
_HOST = os.environ.get("VLLM_HOST_IP", "127.0.0.1")


def main() -> None:
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"{sys.executable} has no package vllm; set rollout.launch.python to the Python that has it")
    port = _free_port()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_announce, args=(port,), daemon=True).start()
    # Workers are new processes, which find the file of their methods by this variable.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    options = ["--host", _HOST, "--port", str(port), "--worker-extension-cls", _WORKER, *_token_interface()]
    sys.argv[1:] = [*options, *sys.argv[1:]]
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)


def _token_interface() -> list[str]:
    """Newer versions offer the interface for tokens only with this option; older ones do not know it."""
    package = importlib.util.find_spec("vllm")
    assert package is not None, "checked"
    assert package.origin is not None, "vllm is a package with code"
    options = Path(package.origin).parent / "entrypoints" / "launchers" / "cli_args.py"
    return ["--enable-scale-out"] if options.is_file() and "enable_scale_out" in options.read_text() else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _announce(port: int) -> None:
    url = f"http://{_HOST}:{port}"
    while True:
        time.sleep(_POLL_S)
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/health", timeout=5):
            print(f"vLLM serves at {url}", flush=True)  # noqa: T201  read by the process that started this one
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
