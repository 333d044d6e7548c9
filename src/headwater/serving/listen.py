"""Running a server: bind the port, serve until a signal arrives, abort the running requests, stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.http import HttpProcessingError

from headwater.core.errors import HeadwaterError
from headwater.core.media import MediaProcessor
from headwater.core.protocols import InferenceEngine, Tokenizer
from headwater.serving.app import build_app
from headwater.serving.options import ServerOptions
from headwater.serving.weight_stream import INCOMING

BACKLOG = 4096
"""The number of connections that may wait to be accepted. A trainer opens hundreds at the same time."""
SHUTDOWN_S = 5.0
"""How long aborted requests may take to send their last tokens."""
_PROBE_AFTER_S, _PROBE_EVERY_S, _NUM_PROBES = 60, 15, 4
"""When the system asks whether a silent client still exists. After two minutes without an answer it is disconnected."""
_LINGER_S = 10.0
_LONGEST_REASON = 200

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Bind ``port`` before the model is loaded, so that a port in use is reported immediately. Port 0 is any free one.

    Clients cannot connect before ``serve`` is called.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise HeadwaterError(f"--host = {host}: no such address ({error.strerror}); use 127.0.0.1") from error
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _probe_silent_clients(taken)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise _cannot_listen(host, port, error) from error
    return taken


def url(taken: socket.socket) -> str:
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    engine: InferenceEngine,
    tokenizer: Tokenizer,
    options: ServerOptions,
    taken: socket.socket,
    say: Callable[[str], None],
    routes: Iterable[web.RouteDef] = (),
    processor: MediaProcessor | None = None,
) -> None:
    """Serve on ``taken`` until Ctrl-C, SIGTERM or SIGHUP. ``routes`` are further calls beside the usual ones.

    ``processor`` is for chats with images.
    """
    asyncio.run(_serve(build_app(engine, tokenizer, options, routes, processor), engine, options, taken, say))


async def _serve(
    app: web.Application,
    engine: InferenceEngine,
    options: ServerOptions,
    taken: socket.socket,
    say: Callable[[str], None],
) -> None:
    runner = make_runner(app, options)
    await runner.setup()
    try:
        site = web.SockSite(runner, taken, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:  # two servers may bind the same port, but only one may listen
            host, port = taken.getsockname()[:2]
            raise _cannot_listen(host, port, error) from error
        with _stop_signal() as stop:
            say(f"serving {options.served_name} at {url(taken)}")
            await stop.wait()
        say("stopping")
        app[INCOMING].fail("the server is stopping")
        await site.stop()
        await asyncio.to_thread(engine.abort)
    finally:
        await runner.cleanup()


def make_runner(app: web.Application, options: ServerOptions) -> web.AppRunner:
    log.addFilter(_one_line)
    return web.AppRunner(
        app,
        handler_cancellation=True,  # a client that disconnects cancels its handler, which aborts its requests
        shutdown_timeout=SHUTDOWN_S,
        keepalive_timeout=options.idle_limit_s,  # also the limit for the header of the first request
        # How long the rest of a body is read that is not wanted, so that the client sees the reply.
        lingering_time=min(_LINGER_S, options.body_limit_s),
        logger=log,
    )


def _one_line(record: logging.LogRecord) -> bool:
    """Log a request that is not valid HTTP as one line: it is an error of the client, so a traceback does not help."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        record.msg, record.args = f"{record.getMessage()}: not valid HTTP: {reason}", ()
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = None
    return True


def _probe_silent_clients(taken: socket.socket) -> None:
    """Connections inherit these settings. The usual ones disconnect a client that has vanished after two hours."""
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_S),
        ("TCP_KEEPINTVL", _PROBE_EVERY_S),
        ("TCP_KEEPCNT", _NUM_PROBES),
    ):
        if hasattr(socket, name):  # not on every system
            taken.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextmanager
def _stop_signal() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C, SIGTERM and SIGHUP set. SIGHUP stays ignored if it was, as under nohup.

    After the block, Ctrl-C and SIGTERM have their usual effect, so that a server that does not stop can be ended.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    for each in signals:
        loop.add_signal_handler(each, stop.set)
    try:
        yield stop
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the shell of a closed terminal sends it again


def _cannot_listen(host: str, port: int, error: OSError) -> HeadwaterError:
    if error.errno == errno.EADDRINUSE:
        return HeadwaterError(f"--port = {port}: {host}:{port} is in use; use another port, or 0 for any free one")
    if error.errno == errno.EACCES:
        return HeadwaterError(f"--port = {port}: needs privileges; use a port above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return HeadwaterError(f"--host = {host}: is not an address of this machine; use 127.0.0.1 or 0.0.0.0")
    return HeadwaterError(f"cannot listen at {host}:{port}: {error.strerror}")
