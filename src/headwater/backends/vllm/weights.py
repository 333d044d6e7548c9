"""Weights for the worker processes of vLLM without a file: ``inside/headwater_vllm_weights.py`` is the other end.

    stream = make_stream(config, info, torch.bfloat16)      # None if the server takes weights from files
    await stream.load(link, info, update, "7", flush=True)  # ``link`` has ``WorkerCalls``
    stream.checksum                                         # of what the workers have received

A worker is busy while it receives, so the slots of shared memory are handed over in shared memory, too: the sender
counts the slots that it has filled, and every worker those that it has copied. A worker copies a slot as a whole and
lets vLLM load the tensors from there, because vLLM keeps the parts of a layer until all of them have come. So neither
side holds a second copy of the model.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch

from headwater.backends.remote.group import GroupStream
from headwater.backends.remote.http import CALL_LIMIT_S
from headwater.backends.remote.link import LinkLost, ServerInfo, WeightStream
from headwater.backends.vllm.inside.headwater_vllm_weights import (
    ABANDONED,
    COMPLETE,
    END,
    FAILED,
    NUM_FILLED,
    NUM_TAKEN,
    in_order,
    table_of,
)
from headwater.config.schema import Config
from headwater.config.server_checks import chosen_transfer, transfer_problem
from headwater.core.errors import ConfigError, HeadwaterError, RolloutFailed
from headwater.core.protocols import WeightUpdate
from headwater.core.waits import poll, wait_for_future
from headwater.weights.collective import LIMIT_S
from headwater.weights.memory import as_announced
from headwater.weights.segments import Segment
from headwater.weights.shared_memory import NUM_SLOTS, SlotSender, slot_size

SLOT_LIMIT_S = 120.0
"""How long the sender waits until a slot has been copied."""
ARRIVE_LIMIT_S = 600.0
"""How long a worker waits for the next weights. The learner may gather them meanwhile, or wait for another server that
does not answer, which a router drops only after ``update_bucket_limit_s``. The healthy servers must not give up before.
A sender that has ended is noticed at once: by its lock, or by its connection."""
_LOAD_LIMIT_S = 600.0
"""How long vLLM may take for what follows the last slot."""
_SHARED_MEMORY = "/dev/shm"
_POLL_S = 0.0005
_LAST_ANSWER_S = 10.0
"""How long the answer of the workers may take after the update was given up. It says more than the sender knows."""


def room_problem(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, num_servers: int) -> str:
    """Why shared memory has no room for the slots of every server of a run; empty if it has.

    The slots of other servers may be allocated already, so they are compared with the size of the shared memory, and
    only those of one server with what is free.
    """
    needed, found = NUM_SLOTS * slot_size(shapes, dtype), os.statvfs(_SHARED_MEMORY)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if needed <= free and num_servers * needed <= total:
        return ""
    return (
        f"the slots for weights need {needed / 2**20:.0f} MiB of {_SHARED_MEMORY} for each of {num_servers} servers, "
        f"and {free / 2**20:.0f} of {total / 2**20:.0f} MiB are free"
    )


def transfer_to(config: Config, info: ServerInfo, *, has_room: bool = True) -> str | None:
    """How weights travel to a server; None if no way that the run may use works for it.

    ``has_room`` is whether the slots fit into shared memory.
    """
    chosen = chosen_transfer(config)
    if chosen == "shared_memory" and config.rollout.weight_transfer == "auto" and not has_room:
        return "file"
    if info.receives_weights or chosen == "file":
        return chosen
    return "file" if config.rollout.weight_transfer == "auto" and not transfer_problem(config, "file") else None


def check_transfer(config: Config, info: ServerInfo, where: str, start_with: str) -> None:
    """Refuse a server that cannot take weights as the recipe says. ``start_with`` is what it lacks."""
    if transfer_to(config, info) is not None:
        return
    other = "use file"
    if transfer_problem(config, "file") is not None:
        other = "set rollout.weight_folder to a folder that both machines see"
    why, remedy = f"was started without {start_with}", "start it with them"
    if info.has_own_worker:
        why = "has several data-parallel engines, or workers with methods of another version of Headwater"
        remedy = f"start it with one engine and {start_with}"
    raise ConfigError(
        [
            f"rollout.weight_transfer = {config.rollout.weight_transfer}: {where} {why}, so its workers take weights "
            f"only from files; {remedy}, or {other}"
        ]
    )


def make_stream(config: Config, info: ServerInfo, dtype: torch.dtype, *, has_room: bool = True) -> WeightStream | None:
    """How weights reach a server without a file; None if they travel through files."""
    transfer = transfer_to(config, info, has_room=has_room)
    if transfer == "collective":
        return GroupStream(config.rollout.weight_link, dtype)
    return SlotStream(dtype) if transfer == "shared_memory" else None


class WorkerCalls:
    """What a link to vLLM tells the workers, over HTTP or in this process: the calls of ``GroupLink``, and slots."""

    takes_whole = True

    async def ask_workers(
        self, method: str, arguments: Mapping[str, Any], *, call_limit_s: float = CALL_LIMIT_S
    ) -> Sequence[Any]:
        """Call a method on every worker, and return what each of them answers."""
        raise NotImplementedError

    async def call_workers(
        self, method: str, *, call_limit_s: float = CALL_LIMIT_S, **arguments: Any
    ) -> Sequence[Mapping[str, Any]]:
        """Call a method of ``inside/headwater_vllm_worker.py``. ``RolloutFailed`` names every worker that failed."""
        call = secrets.token_hex(8)
        answers = await self.ask_workers(method, {**arguments, "call": call}, call_limit_s=call_limit_s)
        problems = [(rank, _problem_of(answer, call)) for rank, answer in enumerate(answers)]
        failures = [f"worker {rank}: {problem}" for rank, problem in problems if problem]
        if failures or not answers:
            raise RolloutFailed(f"{method}: {'; '.join(failures) or 'no worker has answered'}")
        return answers

    async def use_loaded(self, label: str) -> None:
        """The workers have loaded weights: forget what the old ones have made, and label the new ones."""
        raise NotImplementedError

    async def receive_slots(self, order: Mapping[str, Any], label: str) -> str:
        """Return the checksum of what the workers have received."""
        return await self._loaded("headwater_receive_slots", order, label)

    async def release_slots(self) -> None:
        """Unmap the slots of a run that has ended, or is about to."""
        await self.call_workers("headwater_release_slots", call_limit_s=_LAST_ANSWER_S)

    async def join_group(self, body: Mapping[str, Any]) -> None:
        await self.call_workers(
            "headwater_join_group",
            address=body["master_address"],
            port=body["master_port"],
            name=body["group_name"],
            size=body["world_size"],
            limit_s=LIMIT_S,
        )

    async def leave_group(self, name: str) -> None:
        await self.call_workers("headwater_leave_group", name=name)

    async def begin_update(self) -> None:
        """There is one call for an update."""

    async def end_update(self) -> None:
        """There is one call for an update."""

    async def receive(self, body: Mapping[str, Any]) -> str:
        (dtype,) = set(body["dtypes"])
        order = {"name": body["group_name"], "names": body["names"], "shapes": body["shapes"], "dtype": dtype}
        order["limit_s"] = ARRIVE_LIMIT_S
        return await self._loaded("headwater_receive_group", order, body["weight_version"])

    async def _loaded(self, method: str, order: Mapping[str, Any], label: str) -> str:
        # One call receives the whole model. Every slot and every tensor has its own limit.
        answers = await self.call_workers(method, call_limit_s=math.inf, **order)
        checksums: set[str] = {answer["checksum"] for answer in answers}
        if len(checksums) != 1:
            raise RolloutFailed(f"the workers have received different weights: {', '.join(sorted(checksums))}")
        await self.use_loaded(label)
        return checksums.pop()


def _problem_of(answer: Any, call: str) -> str:
    """Why a worker has not done what a call asks for; empty if it has."""
    if not isinstance(answer, Mapping) or answer.get("call") != call:
        return "its answer belongs to another call, so vLLM has mixed up the answers of its workers; restart the server"
    return str(answer.get("failure", ""))


class SlotStream:
    """A ``WeightStream`` through shared memory. The slots of the first update are used again by the others."""

    def __init__(self, dtype: torch.dtype, *, limit_s: float = SLOT_LIMIT_S) -> None:
        """``dtype`` is the number type of the server, ``limit_s`` how long the workers may take to copy a slot."""
        self.checksum = ""
        self._dtype = dtype
        self._limit_s = limit_s
        self._slots: SlotSender | None = None
        self._link: WorkerCalls | None = None
        """To the workers that have the slots mapped."""
        self._sending: asyncio.Task[str] | None = None
        self._is_given_up = False

    def prepare(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._slots_for(shapes)

    async def load(self, link: WorkerCalls, info: ServerInfo, update: WeightUpdate, label: str, *, flush: bool) -> None:
        loop = asyncio.get_running_loop()

        def call(order: Mapping[str, Any]) -> Future[str]:
            return asyncio.run_coroutine_threadsafe(link.receive_slots(order, label), loop)

        await self._give_up()
        if self._sending is not None and not self._sending.done():
            raise RolloutFailed("the update before has not ended: its sender still reads the learner's weights")
        self._is_given_up, self._link = False, link
        self._sending = asyncio.create_task(asyncio.to_thread(self._send, update, info.num_workers, call))
        try:
            self.checksum = await asyncio.shield(self._sending)
        except asyncio.CancelledError:
            await self._give_up()
            raise

    async def _give_up(self) -> None:
        """Return when the thread that sends has ended, so that it no longer reads the learner's weights."""
        self._is_given_up = True
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=self._limit_s)
            with suppress(asyncio.InvalidStateError):
                self._sending.exception()  # its caller has left

    async def end(self) -> None:
        await self._give_up()
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()
        link, self._link = self._link, None
        if link is not None:
            with suppress(LinkLost, HeadwaterError):  # the server may have ended, and its memory with it
                await link.release_slots()

    # On the thread that sends

    def _send(self, update: WeightUpdate, num_workers: int, call: Callable[[Mapping[str, Any]], Future[str]]) -> str:
        slots = self._slots_for(update.shapes)
        with Handover.opened(list(update.shapes), num_workers, self._limit_s) as handover:
            order = {
                "names": list(update.shapes),
                "shapes": [list(shape) for shape in update.shapes.values()],
                "dtype": str(self._dtype).removeprefix("torch."),
                "handover": handover.name,
                "slots": slots.name,
                "slot_bytes": slots.slot_bytes,
                "num_workers": num_workers,
                "limit_s": ARRIVE_LIMIT_S,
            }
            answer: Future[str] | None = None

            def check() -> None:
                if self._is_given_up:
                    raise RolloutFailed("the engine is closed")
                if answer is not None and answer.done():
                    answer.result()
                    raise RolloutFailed("the server answered before it had received all weights")

            try:
                buckets = as_announced(update.buckets, update.shapes, self._dtype)
                for slot, entries in slots.fill(buckets, lambda _: handover.until_free(check)):
                    check()
                    handover.put(slot, entries)
                    if answer is None:  # the limits of the workers begin when the first slot is there
                        answer = call(order)
                handover.end()
                answer = answer or call(order)
                what = "vLLM loads the last weights of an update"
                return wait_for_future(answer, lambda: what, kind="weights", hard_limit_s=_LOAD_LIMIT_S)
            except WorkerFailed:
                handover.abandon()
                assert answer is not None, "the workers were called"
                with suppress(TimeoutError):
                    answer.result(_LAST_ANSWER_S)  # raises why
                raise

    def _slots_for(self, shapes: Mapping[str, tuple[int, ...]]) -> SlotSender:
        if self._slots is not None and slot_size(shapes, self._dtype) > self._slots.slot_bytes:
            self._slots.close()
            self._slots = None
        self._slots = self._slots or SlotSender(shapes, self._dtype)
        return self._slots


class WorkerFailed(RolloutFailed):
    """A worker of vLLM cannot take any more slots."""


class Handover:
    """Which slots are filled and which are copied, as numbers of 8 bytes in a separate segment of shared memory.

    | words | |
    |---|---|
    | ``NUM_FILLED`` | slots filled so far, of which the last one is number ``(NUM_FILLED - 1) % NUM_SLOTS`` |
    | ``END`` | whether more will come, all have come, or the update was given up |
    | ``NUM_TAKEN`` and the following | for every worker, the slots copied so far, or ``FAILED`` |
    | a table for every slot | how many tensors it has; of each, its number among the names, and its offset in bytes |
    """

    def __init__(self, names: Sequence[str], num_workers: int, limit_s: float) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._num_workers = num_workers
        self._limit_s = limit_s
        self._tables = [table_of(slot, num_workers, len(names)) for slot in range(NUM_SLOTS)]
        self._segment = Segment(8 * table_of(NUM_SLOTS, num_workers, len(names)))
        self._words = self._segment.buffer.cast("q")

    @classmethod
    @contextmanager
    def opened(cls, names: Sequence[str], num_workers: int, limit_s: float) -> Iterator[Handover]:
        """Whoever still reads when the block ends is told that the update was given up, unless it is complete."""
        handover = cls(names, num_workers, limit_s)
        try:
            yield handover
        finally:
            handover.close()

    @property
    def name(self) -> str:
        return self._segment.name

    def put(self, slot: int, entries: Sequence[Mapping[str, Any]]) -> None:
        """Hand a filled slot to all workers. ``until_free`` must have returned for it."""
        table = self._tables[slot]
        self._words[table] = len(entries)
        for place, entry in enumerate(entries):
            self._words[table + 1 + 2 * place] = self._numbers[entry["name"]]
            self._words[table + 2 + 2 * place] = entry["offset"]
        in_order()
        self._words[NUM_FILLED] += 1

    def until_free(self, check: Callable[[], None]) -> None:
        """Wait until all workers have copied the slot that is filled next. ``check`` may raise, to end the wait."""
        number = self._words[NUM_FILLED]

        def is_free() -> bool:
            check()
            taken = self._taken()
            if FAILED in taken:
                raise WorkerFailed(f"worker {taken.index(FAILED)} of vLLM cannot load the weights")
            return min(taken) > number - NUM_SLOTS

        def describe() -> str:
            late = [str(rank) for rank, count in enumerate(self._taken()) if count <= number - NUM_SLOTS]
            return f"worker {', '.join(late)} of vLLM copies slot {number - NUM_SLOTS} of the weights"

        poll(is_free, describe, kind="weights", every_s=_POLL_S, hard_limit_s=self._limit_s)
        in_order()

    def _taken(self) -> list[int]:
        return self._words[NUM_TAKEN : NUM_TAKEN + self._num_workers].tolist()

    def end(self) -> None:
        """All slots have been filled."""
        in_order()
        self._words[END] = COMPLETE

    def abandon(self) -> None:
        """No worker waits for another slot."""
        if self._words[END] != COMPLETE:
            self._words[END] = ABANDONED

    def close(self) -> None:
        self.abandon()
        self._words.release()
        self._segment.close()
