"""``headwater route``: one address in front of several servers."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headwater.cli.serve import add_listening, listening, read_options, say
from headwater.core.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.backends.router.engine import RoutedServer, RouterEngine
    from headwater.core.protocols import InferenceEngine, Tokenizer

HELP = (
    "Run a router: one address in front of several running servers, with OpenAI's, SGLang's and Headwater's calls. "
    "Requests with the same session go to the same server; the requests of a server that dies continue on the others. "
    "Servers can be added, drained and removed while it runs. docs/router.md shows how."
)

_ANSWER_S = 10.0
"""How long a server may not answer before the router connects to it anew."""
_RETRY_S = 5.0
"""Time between two attempts to reach a server that was down when the router started."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="address of a server, for example http://127.0.0.1:8001")
    parser.add_argument(
        "--backend",
        metavar="NAME",
        default="native",
        help="what the servers are: native (headwater serve), vllm, sglang, or a backend of your own that talks to "
        "servers; default native",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="where to load the tokenizer from: a model folder, hub id or built-in name; default: what the first "
        "server says it serves",
    )
    parser.add_argument(
        "--max-open",
        type=int,
        metavar="N",
        help="most requests that a server has at the same time; more wait in the router; default 1024, or the server's "
        "own limit if that is smaller",
    )
    parser.add_argument(
        "--max-waiting", type=int, metavar="N", help="most requests that wait for a server; default 65536"
    )
    add_listening(parser)


def run(args: argparse.Namespace) -> int:
    from headwater.backends import BACKENDS, SERVER_KEY

    if not hasattr(BACKENDS.resolve(args.backend), "connect"):
        raise HeadwaterError(
            f"--backend = {args.backend}: does not talk to servers, because it has no method connect(url, context); "
            "use native, vllm or sglang"
        )
    urls = [each.rstrip("/") for each in args.urls]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise HeadwaterError(f"URL = {url}: must be an address such as http://127.0.0.1:8001")
        if urls.count(url) > 1:
            raise HeadwaterError(f"URL = {url}: is given twice; name each server once")
    for option in ("max_open", "max_waiting"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise HeadwaterError(f"--{option.replace('_', '-')} = {getattr(args, option)}: must be >= 1")
    key = os.environ.get(SERVER_KEY, "")
    model = args.model or find_model(urls, key)
    options = read_options(args, served_name=args.served_name or model, model=model)
    with listening(args, options) as taken:
        from headwater.backends.router.routes import make_routes
        from headwater.models.load import load_processor, load_tokenizer
        from headwater.serving.listen import serve

        tokenizer = load_tokenizer(model, key="--model")
        connect = connector(args.backend, model, tokenizer)
        router, missing = _start(urls, connect, args)
        joining = threading.Event()
        threading.Thread(target=_join_later, args=(router, connect, missing, joining), daemon=True).start()
        try:
            serve(
                router,
                tokenizer,
                options,
                taken,
                say=say,
                routes=make_routes(router, connect),
                processor=load_processor(model, key="--model"),
            )
        finally:
            joining.set()
            router.close()
    return 0


def find_model(urls: Sequence[str], key: str) -> str:
    """The model that the first server that answers says it serves."""
    reasons = []
    for url in urls:
        try:
            return _ask_model(url, key)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reasons.append(f"{url}: {error}")
    raise HeadwaterError(f"no server answers ({'; '.join(reasons)}); start one, or correct URL and --backend")


def _ask_model(url: str, key: str) -> str:
    for call in ("/model_info", "/get_model_info"):  # the second is its name before SGLang 0.5.6
        with suppress(urllib.error.HTTPError):  # a server that does not know the call, or whose gateway refuses it
            told = _ask(url + call, key)
            # SGLang's model_path becomes the folder of the weights that it was given last.
            return str(told.get("tokenizer_path") or told["model_path"])
    served = _ask(url + "/v1/models", key)["data"][0]  # vLLM, and most other servers
    return str(served.get("root") or served["id"])


def _ask(url: str, key: str) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_ANSWER_S) as reply:
        return json.load(reply)


def connector(backend: str, model: str, tokenizer: Tokenizer) -> Callable[[str], RoutedServer]:
    """Make a function that connects to a server, whose weights this process leaves as they are."""
    from headwater.backends import BACKENDS, BackendContext
    from headwater.backends.router.engine import RoutedServer
    from headwater.config.schema import Config
    from headwater.observe.spans import Spans

    defaults = Config()
    config = replace(
        defaults,
        model=replace(defaults.model, path=model),
        rollout=replace(defaults.rollout, backend=backend, max_new_tokens=1, server_timeout_s=_ANSWER_S),
        data=replace(defaults.data, max_prompt_tokens=1),
    )
    context = BackendContext(config, model, tokenizer, Spans(), owns_weights=False, is_one_of_many=True)
    kind: Any = BACKENDS.resolve(backend)

    def connect(url: str) -> RoutedServer:
        def again() -> InferenceEngine:
            engine: InferenceEngine = kind.connect(url, context)
            return engine

        return RoutedServer(url, again(), connect=again)

    return connect


def _start(
    urls: Sequence[str], connect: Callable[[str], RoutedServer], args: argparse.Namespace
) -> tuple[RouterEngine, list[str]]:
    """The router over the servers that answer, and the addresses of the others."""
    from concurrent.futures import ThreadPoolExecutor

    from headwater.backends.router.engine import RouterEngine, RouterOptions

    with ThreadPoolExecutor(len(urls)) as threads:
        attempts = {url: threads.submit(connect, url) for url in urls}
    servers = [each.result() for each in attempts.values() if each.exception() is None]
    failures = {url: each.exception() for url, each in attempts.items() if each.exception() is not None}
    for error in failures.values():
        if not isinstance(error, HeadwaterError) or not servers:
            for server in servers:
                server.engine.close()
            raise error or AssertionError("it failed")
    for url, error in failures.items():
        print(f"warning: {url} cannot be used yet and is tried again: {error}", file=sys.stderr, flush=True)
    defaults = RouterOptions()
    options = replace(
        defaults,
        max_open_per_server=args.max_open or defaults.max_open_per_server,
        max_waiting=args.max_waiting or defaults.max_waiting,
    )
    try:
        return RouterEngine(servers, options), list(failures)
    except BaseException:
        for server in servers:
            server.engine.close()
        raise


def _join_later(
    router: RouterEngine, connect: Callable[[str], RoutedServer], missing: list[str], stop: threading.Event
) -> None:
    """Add the servers that did not answer at the start, once they do."""
    while missing and not stop.wait(_RETRY_S):
        for url in list(missing):
            try:
                server = connect(url)
            except HeadwaterError:
                continue
            missing.remove(url)
            try:
                router.add(server)
            except (HeadwaterError, ValueError) as error:
                print(f"warning: {url} is not used: {error}", file=sys.stderr, flush=True)
                server.engine.close()
