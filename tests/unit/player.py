"""A server in a thread that plays recorded exchanges."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def serving(*routes: web.RouteDef) -> Iterator[str]:
    """Yield the URL at which ``routes`` are served."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    urls: list[str] = []

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        return runner

    async def end() -> None:
        await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(300)
    try:
        yield urls[0]
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(300)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(300)
        loop.close()
