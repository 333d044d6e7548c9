"""A program that speaks as ``headwater serve`` does, starts in a moment, and fails as it is told.

    python stub_server.py FOLDER --port 0 ...

In place of a model it is given a folder. ``plan.json`` says how each process behaves in turn, the last one for all that
follow; every process adds a line to ``children.jsonl`` when it starts and one to ``calls.jsonl`` for each call.

"serve": does what it should; "exit": ends before it serves; "die": is killed by the first request; "half": the same,
after a token. An object is about one "path", also "requests" or "/headwater/connect"; the rest is as it should be:
{"path": "/control/pause", "code": "engine_unavailable"}: answers so, with "times" only the first so many; with "text"
says just that; with "last_words" says that on its output, and ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path

FOLDER = Path(sys.argv[1])


def note(name: str, content: object) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(content) + "\n")


def read_plan() -> object:
    plan = json.loads((FOLDER / "plan.json").read_text())
    children = FOLDER / "children.jsonl"
    number = len(children.read_text().splitlines()) if children.exists() else 0
    note(children.name, os.getpid())
    return plan[min(number, len(plan) - 1)]


PLAN = read_plan()
if PLAN == "exit":
    sys.exit("there is no memory left")

# Imported only here, which takes half a second.
from aiohttp import WSMsgType, web  # noqa: E402

from headwater.core.new_tokens import NewTokens  # noqa: E402
from headwater.core.requests import Delta  # noqa: E402


def is_planned(path: str, how: str) -> bool:
    return isinstance(PLAN, dict) and PLAN["path"] == path and how in PLAN


def end_if_planned(path: str) -> None:
    if is_planned(path, "last_words"):
        print(PLAN["last_words"], flush=True)  # noqa: T201
        os._exit(7)


def refusal(path: str) -> dict | None:
    if is_planned(path, "code") and PLAN.get("times", 1) > 0:
        if "times" in PLAN:
            PLAN["times"] -= 1
        return {"error": {"message": f"{path} is out of order", "type": "server_error", "code": PLAN["code"]}}
    return None


async def control(request: web.Request) -> web.Response:
    note("calls.jsonl", [os.getpid(), request.path])
    end_if_planned(request.path)
    if is_planned(request.path, "text"):
        return web.Response(text=PLAN["text"], content_type="text/html")
    return web.json_response(refusal(request.path) or {"checksum": "float32-7", "needs_weights": False})


async def connect(request: web.Request) -> web.WebSocketResponse:
    end_if_planned(request.path)
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            asked = json.loads(message.data)
            if "request" in asked:
                await answer(socket, asked["id"], len(asked["request"]["given_tokens"]))
    return socket


async def answer(socket: web.WebSocketResponse, number: int, num_given: int) -> None:
    if PLAN == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_planned("requests", "text"):
        await socket.send_str(PLAN["text"])
        return
    if (refused := refusal("requests")) is not None:
        await socket.send_str(json.dumps([{"id": number, **refused}]))
        return
    new = NewTokens.of_delta(number, Delta((num_given,), (-0.5,), (0,)))
    await socket.send_bytes(NewTokens.join([new], [] if PLAN == "half" else [(number, "length")]).encode())
    if PLAN == "half":
        os.kill(os.getpid(), signal.SIGKILL)


async def announce(app: web.Application) -> None:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    print(f"serving {FOLDER} at http://{host}:{port}", flush=True)  # noqa: T201


def end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    app = web.Application()
    app.router.add_get("/headwater/connect", connect)
    app.router.add_route("*", "/{path:.*}", control)

    async def serve() -> None:
        await announce(app)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
