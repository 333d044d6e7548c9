"""Real services on 127.0.0.1 for tests, each in a separate thread."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from aiohttp import web


class Service:
    """An HTTP server whose ``answers`` decide what happens next: text, a status, a pause in seconds, or a function."""

    def __init__(self, path: str, answer: Any) -> None:
        self.requests: list[Any] = []
        self.next: list[Any] = []
        """What the next requests get; then ``answer``, a function of the request."""
        self._path, self._answer = path, answer
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""

    def __enter__(self) -> Service:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post(self._path, self._handle)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _handle(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.requests.append(payload)
        planned = self.next.pop(0) if self.next else None
        if isinstance(planned, float):
            await asyncio.sleep(planned)
        elif isinstance(planned, int):
            return web.Response(status=planned, text="planned")
        elif isinstance(planned, str):
            return web.Response(text=planned)
        elif planned is not None:
            return web.json_response(planned)
        return web.json_response(self._answer(payload))


def retrieval(documents: list[str]) -> Service:
    """Search-R1's protocol: documents that contain the first word of a query."""

    def answer(payload: dict[str, Any]) -> dict[str, Any]:
        def find(query: str) -> list[dict[str, Any]]:
            found = [each for each in documents if query.split()[0].lower() in each.lower()][: payload["topk"]]
            return [{"document": {"id": "0", "contents": each}, "score": 1.0} for each in found]

        return {"result": [find(query) for query in payload["queries"]]}

    return Service("/retrieve", answer)


def run_code() -> Service:
    """Sandbox Fusion's protocol, for the code of these tests."""

    def answer(payload: dict[str, Any]) -> dict[str, Any]:
        output, began = io.StringIO(), time.monotonic()
        result = {"status": "Finished", "return_code": 0, "stderr": ""}
        try:
            with contextlib.redirect_stdout(output):
                exec(payload["code"], {})
        except Exception as error:  # noqa: BLE001  the code may raise anything
            result = {"status": "Finished", "return_code": 1, "stderr": f"{type(error).__name__}: {error}\n"}
        result |= {"stdout": output.getvalue(), "execution_time": time.monotonic() - began}
        status = "Success" if result["return_code"] == 0 else "Failed"
        return {"status": status, "message": "", "compile_result": None, "run_result": result}

    return Service("/run_code", answer)


def run_scripts() -> Service:
    """Sandbox Fusion's protocol, with a process and a folder for each script."""

    def answer(payload: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "main.py").write_text(payload["code"])
            try:
                ended = subprocess.run(
                    [sys.executable, "main.py"],
                    input=payload["stdin"],
                    cwd=folder,
                    env={"PATH": os.environ["PATH"]},
                    capture_output=True,
                    text=True,
                    timeout=payload["run_timeout"],
                    check=False,
                )
            except subprocess.TimeoutExpired:
                result: dict[str, Any] = {"status": "TimeLimitExceeded", "return_code": None}
            else:
                result = {"status": "Finished", "return_code": ended.returncode}
                result |= {"stdout": ended.stdout, "stderr": ended.stderr}
        result |= {"execution_time": time.monotonic() - began}
        status = "Success" if result["return_code"] == 0 else "Failed"
        return {"status": status, "message": "", "compile_result": None, "run_result": result}

    return Service("/run_code", answer)
