"""What ``test_rank_memory.py`` runs on four ranks: the memory that each rank needs at most in every call.

    torchrun --nproc-per-node 4 tests/integration/four_ranks.py FOLDER

``FOLDER/model`` is a model of 200 MiB, ``FOLDER/small`` a tiny one. Rank 0 writes
``FOLDER/results.json``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import torch
from integration.two_ranks import COMMON, RECIPE, Case, experience

from headwater.cluster.torchrun import join
from headwater.config.load import load_config
from headwater.core.learner import Learner
from headwater.core.parcels import Parcel, SendOrder
from headwater.learner import learner as learner_module
from headwater.learner import sharded_checkpoint
from headwater.learner.build import LearnerSpec, build_learner
from headwater.learner.held import held_by
from headwater.learner.learner import LocalLearner
from headwater.weights.links import host_store
from headwater.weights.memory import in_buckets
from headwater.weights.pieces import GroupMember, PieceReceiver

NUM_RANKS = 4
NUM_PUBLISHED = 4
NUM_UPDATED = 3
BUCKET_BYTES = 8 * 2**20
LIMIT_S = 300.0


def resident(name: str) -> int:
    """Bytes of this process that are in memory: ``VmRSS`` now, ``VmHWM`` at most since the last ``reset``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def reset() -> int:
    """Return what is in memory now, and begin to watch for the highest value."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


class Watch:
    """How much more memory this process has used since the watch began.

    The system keeps the peak only of all memory, with the pages of files that were read, which it can take back. A
    thread looks for the peak without them. It may miss a peak of milliseconds, but a model takes longer to fill.
    """

    def __init__(self) -> None:
        self._before = reset()
        self._anonymous_before = self._anonymous = resident("RssAnon")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self._anonymous = max(self._anonymous, resident("RssAnon"))

    def end(self) -> tuple[int, int]:
        """Bytes at most: all, and without pages of files."""
        self._ended.set()
        self._thread.join()
        return resident("VmHWM") - self._before, self._anonymous - self._anonymous_before


class Watched(LocalLearner):
    """A learner that also tells how much memory its calls needed in addition."""

    _watch: Watch

    def watch(self) -> None:
        self._watch = Watch()

    def needed(self) -> tuple[int, int]:
        """Since ``watch``, at most."""
        return self._watch.end()

    def held(self) -> int:
        """Bytes of the parameters that this rank holds."""
        return sum(held_by(each).nbytes for each in self.actor.engine.module.parameters())


def build(spec: LearnerSpec) -> Watched:
    watch = Watch()
    learner = build_learner(spec)
    learner.__class__ = Watched
    learner._watch = watch  # type: ignore[attr-defined]
    return learner  # type: ignore[return-value]


def spec_of(model: Path) -> LearnerSpec:
    settings = [*COMMON, f"model.path={model}", "trainer.num_prompts_per_step=4", "eval.every_steps=0"]
    return LearnerSpec(load_config(RECIPE, settings).config, str(model), str(model))


def receive(order: SendOrder, parcels: list[Parcel]) -> None:
    """An engine that takes weights from all ranks and forgets them, in a process whose memory does not count."""
    member = GroupMember.join(order, 1, NUM_RANKS)
    try:
        for _ in PieceReceiver(member, parcels, order).update(1).buckets:
            pass
    finally:
        member.close()


def broadcast(learner: Learner, group: str, watched) -> None:
    port, limits = host_store("127.0.0.1").port, {"bucket_bytes": BUCKET_BYTES, "limit_s": LIMIT_S}
    order = SendOrder(group, "127.0.0.1", port, 1, "float32", **limits)
    parcels = list(learner.parcels())
    receiver = get_context("spawn").Process(target=receive, args=[order, parcels])
    receiver.start()
    try:
        assert not any(each.failure for each in learner.connect(order))
        with watched("broadcast"):
            reports = learner.broadcast(order)
        assert not any(each.failure for each in reports), reports
        assert sum(each.num_bytes for each in reports) == sum(each.starts[-1] for each in parcels) * 4
        receiver.join(LIMIT_S)
        assert receiver.exitcode == 0
    finally:
        receiver.kill()


def run(learner: Learner, folder: Path, watched) -> None:
    data = experience(Case())
    with watched("update"):
        learner.update(data)
    # On a busy machine a rank may wait for others in some of these while it holds more than it needs to go on, and the
    # first rank's memory grows by what the call before has freed. What a call itself needs, it needs every time, so the
    # least of them counts.
    for number in range(NUM_UPDATED):
        with watched(f"update_again {number}"):
            learner.update(data)
    for number in range(NUM_PUBLISHED):
        with watched(f"publish {number}"):
            sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in learner.export()]
        assert max(sizes) <= BUCKET_BYTES, sizes
    broadcast(learner, folder.name, watched)
    for name in ("snapshot", "snapshot_again"):
        (folder / name).mkdir(parents=True)
        with watched(name):
            snapshot = learner.snapshot(folder / name)
            assert snapshot is not None
            snapshot.write()
    with watched("save"):
        learner.save(folder)
    with watched("load"):
        learner.load(folder)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Otherwise the whole model would be one bucket.
    learner_module.in_buckets = partial(in_buckets, max_bytes=BUCKET_BYTES)  # type: ignore[assignment]
    sharded_checkpoint.MAPPED_BYTES = BUCKET_BYTES
    with closing(join()) as group:
        if group.rank:
            group.serve()
            return
        results: dict[str, list[int]] = {}

        def note(name: str) -> None:
            needed = group.call("needed", [()] * NUM_RANKS)
            results[name], results[f"{name}, anonymous"] = map(list, zip(*needed, strict=True))

        class watched:
            def __init__(self, name: str) -> None:
                self.name = name

            def __enter__(self) -> None:
                group.call("watch", [()] * NUM_RANKS)

            def __exit__(self, *_: object) -> None:
                note(self.name)

        # First with a tiny model, so that what is imported and cached once is not counted.
        run(group.build(build, spec_of(folder / "small"), timeout_s=300), folder / "of_small", watched)
        learner = group.build(build, spec_of(folder / "model"), timeout_s=300)
        note("start")
        results["held"] = group.call("held", [()] * NUM_RANKS)
        run(learner, folder / "of_model", watched)
        for name, times in (("publish", NUM_PUBLISHED), ("update_again", NUM_UPDATED)):
            repeated = [results.pop(f"{name} {number}") for number in range(times)]
            results[name] = [min(values) for values in zip(*repeated, strict=True)]
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
