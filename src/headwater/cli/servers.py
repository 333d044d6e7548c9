"""``headwater servers``: list, add, drain and remove the servers of a run while it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import HeadwaterError, RunError

if TYPE_CHECKING:
    from headwater.config.schema import Config
    from headwater.observe.run_directory import RunDirectory

HELP = (
    "List the servers of a run while it runs, or change them: add one that runs already, send no more requests to one, "
    "or remove one. The run must have several servers. A resumed run starts with the servers of its recipe again. "
    "docs/router.md says what happens to requests and weights."
)
EXAMPLES = """\
examples:
  headwater servers runs/my-run                                    list them
  headwater servers runs/my-run add http://10.0.0.9:8000           the run sends it the newest weights, then requests
  headwater servers runs/my-run drain http://10.0.0.7:8000 --move  others continue its requests
  headwater servers runs/my-run undrain http://10.0.0.7:8000       send requests to it again
  headwater servers runs/my-run remove http://10.0.0.7:8000        wait until its requests have ended, and forget it

A server that is added must be reserved for the run. If it requires an API key, the run needs it in the environment
variable HEADWATER_SERVER_KEY, as for the servers of rollout.servers."""
_CHANGES = ("add", "drain", "undrain", "remove")
_LIST_LIMIT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "headwater servers RUN [--json]\n"
        "       headwater servers RUN add URL\n"
        "       headwater servers RUN drain|undrain|remove NAME [--move]"
    )
    parser.epilog = EXAMPLES
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, for example runs/my-run")
    parser.add_argument("change", nargs="?", choices=_CHANGES, metavar="CHANGE", help="add, drain, undrain or remove")
    parser.add_argument(
        "name",
        nargs="*",
        metavar="NAME",
        help="the server: an address, or a name that the list shows, such as server 0",
    )
    parser.add_argument(
        "--move",
        action="store_true",
        help="with drain and remove: other servers continue the requests of this one at once, instead of waiting until "
        "they have ended",
    )
    parser.add_argument("--json", action="store_true", help="print the servers as JSON")


def run(args: argparse.Namespace) -> int:
    from headwater.observe.run_directory import RunDirectory

    change, name = args.change, " ".join(args.name)
    if change is not None and not name:
        what = "the address of a running server, for example http://127.0.0.1:8001" if change == "add" else "a server"
        raise HeadwaterError(f"{change}: name {what}")
    if args.move and change not in ("drain", "remove"):
        raise HeadwaterError("--move goes with drain and remove")
    directory = RunDirectory.open(args.run)
    if change is None:
        answer = _call(directory, "/servers", None, _LIST_LIMIT_S)
    else:
        answer = _change(directory, change, name, moves=args.move)
    if args.json:
        print(json.dumps(answer, indent=1))
        return 0
    for line in _table(answer):
        print(line)
    for line in _differences(directory, answer):
        print(line)
    return 0


def _change(run: RunDirectory, change: str, name: str, *, moves: bool) -> dict[str, Any]:
    from headwater.core.waits import ENGINE_CALL_LIMIT_S

    if change == "add":
        return _call(run, "/servers", {"url": name}, ENGINE_CALL_LIMIT_S)
    name = name.rstrip("/")
    if change == "undrain":
        return _call(run, "/servers/undrain", {"name": name}, _LIST_LIMIT_S)
    if change == "remove" and not moves:
        told = f"Waiting until the requests of {name} have ended (with --move, other servers continue them)"
        print(told, file=sys.stderr, flush=True)
    # The run has this limit itself, for each of the steps of a removal. Its message says more.
    limit_s = 3 * ENGINE_CALL_LIMIT_S + _LIST_LIMIT_S
    return _call(run, f"/servers/{change}", {"name": name, "move": moves}, limit_s)


def _call(run: RunDirectory, path: str, body: Mapping[str, Any] | None, limit_s: float) -> dict[str, Any]:
    from http.client import HTTPException

    from headwater.observe.run_socket import CallRefused, NothingListens, call

    try:
        return call(run.servers_socket, path, body, limit_s=limit_s)
    except NothingListens:
        raise _why_nothing_listens(run) from None
    except CallRefused as error:
        raise HeadwaterError(str(error)) from None
    except PermissionError:
        raise RunError(f"{run.path}: only the user who started the run can list or change its servers") from None
    except TimeoutError:
        told = "" if body is None else "; the run still makes the change, and `headwater servers` shows when it is done"
        raise RunError(f"{run.path}: the process of the run has not answered for {limit_s:g} s{told}") from None
    except (ConnectionError, HTTPException, ValueError):
        raise RunError(f"{run.path}: the run has ended before it answered") from None


def _why_nothing_listens(run: RunDirectory) -> RunError:
    from headwater.config.load import load_config
    from headwater.core.processes import boot_id
    from headwater.observe.run_lock import holder_of

    config = load_config(run.config_file, was_accepted=True).config
    if (problem := _lacks_router(config)) is not None:
        return RunError(f"{run.path}: {problem}")
    holder = holder_of(run.lock_file)
    if holder is None:
        return RunError(
            f"{run.path}: is not running, and servers can only be changed while it runs; `headwater train --resume "
            f"{run.path}` starts with the servers of its recipe (rollout.servers, rollout.launch)"
        )
    if holder.boot != boot_id():
        return RunError(f"{run.path}: is written by {holder}; call `headwater servers` on that machine")
    return RunError(
        f"{run.path}: {holder} is starting or ending, or cannot have a socket in this folder; `headwater doctor "
        f"{run.path}` shows what it does and its warnings"
    )


def _lacks_router(config: Config) -> str | None:
    """Why the run has no servers that can be changed; None if it has several."""
    from headwater.cluster.resources import num_servers

    rollout = config.rollout
    if config.cluster.kind == "ray":
        count = num_servers(config) or len(rollout.servers)
    else:
        count = len(rollout.servers) or (rollout.launch.count if rollout.is_separate else 0)
    if count > 1:
        return None
    remedy = (
        "name at least two running servers in rollout.servers, or use rollout.placement=disaggregated with "
        "rollout.launch.num_servers=2, and start or resume it with that"
    )
    if count == 1:
        return f"has a single server, without the router that servers are added to; {remedy}"
    return f"generates in its own process (rollout.placement = {rollout.placement}), so it has no servers; {remedy}"


def _table(answer: Mapping[str, Any]) -> list[str]:
    servers: Sequence[Mapping[str, Any]] = answer["servers"]
    width = max(len(each["name"]) for each in servers)
    waiting = answer["router_num_waiting"]
    requests = f"{waiting} request waits" if waiting == 1 else f"{waiting} requests wait"
    lines = [f"{len(servers)} servers, policy version {answer['version']}, {requests} for a server"]
    for each in servers:
        restarts = f", replaced {each['num_restarts']} times" if each["num_restarts"] else ""
        load = f"{each['num_running']} running, {each['num_waiting']} waiting{restarts}"
        lines.append(f"  {each['name']:<{width}}  version {each['version']}, {load}; {each['state']}")
    return lines


def _differences(run: RunDirectory, answer: Mapping[str, Any]) -> list[str]:
    """What a resume would undo."""
    from headwater.observe.server_changes import Difference, read_changes

    changed = Difference.of(read_changes(run.servers_file))
    if not changed:
        return []
    lines = [f"Changed while the run runs: {changed}. A resumed run starts with the servers of its recipe again."]
    names = [each["name"] for each in answer["servers"]]
    if all("://" in name for name in names):
        lines.append(f"To keep these servers, resume it with 'rollout.servers=[{', '.join(names)}]'")
    return lines
