"""``headwater ui``: a local web page over run directories."""

from __future__ import annotations

import argparse
import html
import os
import re
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.core.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.dashboard.runs import Runs

HELP = (
    "Open a local web page that shows runs, live or finished: curves, timeline, the doctor's findings, and every "
    "rollout with all values of every token. It only reads the run directories, and only this machine can reach it."
)
_DEFAULT_PORT = 7474
_AUTOMATIC = "auto"
TOKEN = "HEADWATER_UI_TOKEN"
"""The environment variable with the token."""
_TOKEN_LIKE = re.compile(r"[A-Za-z0-9._~-]{8,200}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="RUNS_DIR",
        help="a folder of runs, or one run; default: runs",
    )
    parser.add_argument(
        "--port", type=int, default=None, metavar="N", help=f"port; 0 is any free one; default {_DEFAULT_PORT}"
    )
    parser.add_argument(
        "--token",
        default="",
        metavar="auto",
        help="on a machine with other users: make a token and ask for it; the address that is printed contains it. To "
        f"choose the token, set {TOKEN}: on the command line, other users could read it",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="also show the state of this running server (headwater serve or route); may be repeated",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    parser.add_argument(
        "--export", type=Path, metavar="FILE.html", help="write one run as a page that needs no server, and stop"
    )
    parser.add_argument("--rollout", metavar="ID", help="with --export: only this rollout, for example step_000003:17")


def run(args: argparse.Namespace) -> int:
    from headwater.dashboard.runs import Place, Runs

    place = Place.of(args.path)
    if args.rollout and args.export is None:
        raise HeadwaterError("--rollout: needs --export FILE.html")
    if args.export is not None:
        return _export(Runs(place), args.export, args.rollout)
    return _serve(Runs(place), args)


def _export(runs: Runs, file: Path, rollout: str | None) -> int:
    from headwater.dashboard.answers import Answers
    from headwater.dashboard.assets import Assets
    from headwater.dashboard.errors import Refused
    from headwater.dashboard.export import export

    if runs.place.single is None:
        raise HeadwaterError(
            "--export: name one run, for example: headwater ui runs/quickstart --export quickstart.html"
        )
    try:
        text = export(Answers(runs), Assets(), runs.place.single, rollout)
    except Refused as refused:
        raise HeadwaterError(refused.message.removesuffix(".")) from refused
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"{file}: {len(text.encode()) / 2**20:.1f} MB; open it in any browser")
    return 0


def _serve(runs: Runs, args: argparse.Namespace) -> int:
    from headwater.dashboard.app import bind, serve

    servers = tuple(each.rstrip("/") for each in args.server)
    for url in servers:
        if not url.startswith(("http://", "https://")):
            raise HeadwaterError(f"--server = {url}: must be an address such as http://127.0.0.1:8001")
    if args.port is not None and not 0 <= args.port <= 65535:
        raise HeadwaterError(f"--port = {args.port}: must be between 0 and 65535")
    token = _token(args.token)
    try:
        taken = bind("127.0.0.1", _DEFAULT_PORT if args.port is None else args.port)
    except HeadwaterError:
        if args.port is not None:
            raise
        taken = bind("127.0.0.1", 0)  # another dashboard has the usual port

    def ready(url: str) -> None:
        shown = runs.place.root / (runs.place.single or "")
        print(f"Showing {shown} at {url}  (Ctrl-C stops)", flush=True)
        if not runs.names():
            print("There are no runs yet. They appear on the page when they start.", flush=True)
        if not args.no_browser:
            _open(redirect(url, redirects) if token else url)

    with tempfile.TemporaryDirectory(prefix="headwater-ui-") as redirects:
        serve(runs, taken, token, servers, ready)
    print("stopped", file=sys.stderr)
    return 0


def _token(given: str) -> str:
    """Empty if none is asked for. Error messages do not repeat it."""
    if given not in ("", _AUTOMATIC):
        raise HeadwaterError(
            f"--token: must be auto. Other users of this machine could read a token on the command line; set {TOKEN} "
            "to choose one"
        )
    chosen = os.environ.get(TOKEN, "")
    if chosen and not _TOKEN_LIKE.fullmatch(chosen):
        raise HeadwaterError(f"{TOKEN}: must have 8 to 200 letters, digits or characters of . _ ~ -")
    return chosen or (secrets.token_urlsafe(16) if given else "")


def redirect(url: str, folder: str) -> str:
    """The address of a file that only this user can read, and that leads to ``url``. All users can read the command
    line of a browser, so the token must not be in it."""
    descriptor, path = tempfile.mkstemp(".html", dir=folder)  # mode 0600
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>Headwater</title>'
            f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">'
            f'<p><a href="{html.escape(url)}">Open the dashboard</a></p>\n'
        )
    return Path(path).as_uri()


def _open(url: str) -> None:
    """In a thread: a browser in the terminal would wait for its user."""
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
