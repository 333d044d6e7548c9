"""How long the ranks of a learner and engines take to connect for ``rollout.weight_transfer=collective``, over gloo.

    python benchmarks/collective_groups.py [--groups 1x4 4x4 8x8 8x24] [--mib 16]

``8x24`` is 8 ranks and 24 engines: 8 groups, each of one rank and all engines. Every member is a process of this
machine. It joins with the code of a run, then every rank sends ``--mib`` of bytes to all engines. ``full mesh`` is the
same with a connection from every member of a group to every other, as ``torch.distributed`` connects gloo.

Connecting is timed from when all processes have started until the last one has joined. Files and sockets are those
that joining and sending has added: the most of any engine, of any rank, and of the trainer, whose store they meet in.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from record import write_record

from headwater.core.parcels import SendOrder
from headwater.weights import pieces
from headwater.weights.links import Link, host_store, make_room
from headwater.weights.pieces import GroupMember

LIMIT_S = 120.0


@dataclass(frozen=True)
class Held:
    """Open files of a process, and how many of them are sockets."""

    files: int
    sockets: int

    @classmethod
    def now(cls) -> Held:
        targets = []
        for each in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                targets.append(os.readlink(each))
        return cls(len(targets), sum(each.startswith("socket:") for each in targets))

    def since(self, before: Held) -> Held:
        return Held(self.files - before.files, self.sockets - before.sockets)


@dataclass(frozen=True)
class Seen:
    """What one process has measured."""

    is_engine: bool
    joined_at: float
    sent_at: float
    held: Held


def take_part(
    number: int, num_ranks: int, order: SendOrder, lazy: bool, num_bytes: int, start: Any, all_joined: Any, end: Any
) -> Seen:
    """One member: an engine if ``number`` is at least ``num_ranks``."""
    torch.set_num_threads(1)
    rank_meeting = pieces._meeting
    is_engine = number >= num_ranks
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    with patch.object(pieces, "_meeting", lambda *given: replace(rank_meeting(*given), connects_first=lazy)):
        before = Held.now()
        start.wait(LIMIT_S)
        if is_engine:
            links = GroupMember.join(order, number - num_ranks + 1, num_ranks).links
        else:
            links = [Link.connect(pieces._meeting(order, number), 0, 1 + order.num_receivers)]
    joined_at = time.time()
    all_joined.wait(LIMIT_S)
    for link in links:  # one after another, because an engine receives into one buffer
        link.broadcast(tensor).wait()
    sent_at = time.time()
    end.wait(LIMIT_S)
    held = Held.now().since(before)
    end.wait(LIMIT_S)
    for link in links:
        link.close()
    return Seen(is_engine, joined_at, sent_at, held)


def report(results: Any, *given: Any) -> None:
    results.put(take_part(*given))


def measure(num_ranks: int, num_engines: int, lazy: bool, num_bytes: int) -> dict[str, Any]:
    context = multiprocessing.get_context("forkserver")
    before = Held.now()
    make_room(num_ranks * (1 + num_engines), "the store")
    name = f"groups-{num_ranks}x{num_engines}-{lazy}"
    order = SendOrder(name, "127.0.0.1", host_store("127.0.0.1").port, num_engines, "bfloat16", limit_s=LIMIT_S)
    num_members = num_ranks + num_engines
    start, all_joined, end = (context.Barrier(1 + num_members) for _ in range(3))
    results = context.Queue()
    shared = (num_ranks, order, lazy, num_bytes, start, all_joined, end)
    members = [context.Process(target=report, args=(results, each, *shared)) for each in range(num_members)]
    for each in members:
        each.start()
    start.wait(LIMIT_S)
    started_at = time.time()
    all_joined.wait(LIMIT_S)
    sending_at = time.time()
    end.wait(LIMIT_S)
    trainer = Held.now().since(before)
    end.wait(LIMIT_S)
    seen = [results.get(timeout=LIMIT_S) for _ in members]
    for each in members:
        each.join(LIMIT_S)

    def most(is_engine: bool, count: Callable[[Held], int]) -> int:
        return max(count(each.held) for each in seen if each.is_engine is is_engine)

    return {
        "ranks": num_ranks,
        "engines": num_engines,
        "connect": "tree" if lazy else "full mesh",
        "connect_s": max(each.joined_at for each in seen) - started_at,
        "send_s": max(each.sent_at for each in seen) - sending_at,
        "engine_sockets": most(True, lambda held: held.sockets),
        "engine_files": most(True, lambda held: held.files),
        "rank_sockets": most(False, lambda held: held.sockets),
        "store_sockets": trainer.sockets,
    }


def pair(text: str) -> tuple[int, int]:
    ranks, _, engines = text.partition("x")
    try:
        return int(ranks), int(engines)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give ranks and engines, such as 8x24") from None


def main() -> None:
    # Without options.py: every process imports this script, and the models' shapes take longer than all the rest.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--groups", type=pair, nargs="+", default=[(1, 4), (4, 4), (8, 8), (8, 24)], metavar="RxS")
    parser.add_argument("--mib", type=float, default=16.0, help="what every rank sends (default 16)")
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch.distributed", "headwater.weights.pieces"])
    rows = []
    print("ranks  engines    connect  connect s  send s  engine: sockets  files  rank: sockets  store: sockets")
    for num_ranks, num_engines in options.groups:
        for lazy in (False, True):
            row = measure(num_ranks, num_engines, lazy, int(options.mib * 2**20))
            rows.append(row)
            held = f"{row['engine_sockets']:>15,}  {row['engine_files']:>5,}  {row['rank_sockets']:>13,}"
            print(
                f"{num_ranks:>5}  {num_engines:>7}  {row['connect']:>9}  {row['connect_s']:>9.2f}  "
                f"{row['send_s']:>6.2f}  {held}  {row['store_sockets']:>14,}",
                flush=True,
            )
    write_record(options.out, torch.device("cpu"), mib=options.mib, rows=rows)


if __name__ == "__main__":
    main()
