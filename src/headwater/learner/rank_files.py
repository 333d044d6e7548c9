"""How the ranks of a learner tell each other that they have written their files of a checkpoint.

    with reporting(folder, rank):
        write_my_files(folder)                 # on a thread of this rank
    wait_for_ranks(folder, range(1, 8))        # on the first rank; raises the error of a rank that has failed

They do so through small files in the folder of the checkpoint, which all of them see. A thread that writes must not
take part in collective operations: the training step uses them at the same time, and both would wait for each other.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwater.core.errors import DiskFull, RunError
from headwater.core.waits import poll

logger = logging.getLogger(__name__)

WRITE_LIMIT_S = 6 * 3600.0
"""For the files of one rank. A large checkpoint on a slow disk takes long."""
_LOOK_S = 0.1
_SHARED_S = 10.0


@contextmanager
def reporting(folder: Path, rank: int) -> Iterator[None]:
    """Report the end of the block, or its error, which is not raised: no one waits for the thread of a rank."""
    report: dict[str, object] = {}
    try:
        yield
    except Exception as error:  # noqa: BLE001  reported to the rank that waits for it
        logger.warning("rank %d could not write its files of a checkpoint: %s", rank, error)
        needed = error.needed_bytes if isinstance(error, DiskFull) else 0
        report = {"error": str(error) or type(error).__name__, "is_full": isinstance(error, DiskFull), "needed": needed}
    path = _report(folder, rank)
    # If the folder is gone, the checkpoint was given up. On a full disk, an empty file still says that writing failed.
    with suppress(OSError):
        partial = path.with_suffix(".partial")
        partial.touch()
        with suppress(OSError):
            partial.write_text(json.dumps(report), encoding="utf-8")
        partial.replace(path)


def wait_for_ranks(folder: Path, ranks: Iterable[int], check: Callable[[], None] = lambda: None) -> None:
    """Return when these ranks have written their files. ``check`` raises if a rank has ended."""
    missing = set(ranks)

    def is_done() -> bool:
        check()
        for rank in sorted(missing):
            if _has_written(folder, rank):
                missing.discard(rank)
        return not missing

    def describe() -> str:
        return f"ranks {', '.join(map(str, sorted(missing)))} write their files of {folder.name.lstrip('.')}"

    poll(is_done, describe, kind="checkpoint", every_s=_LOOK_S, hard_limit_s=WRITE_LIMIT_S)


def _has_written(folder: Path, rank: int) -> bool:
    try:
        text = _report(folder, rank).read_text(encoding="utf-8")
    except FileNotFoundError:
        if not folder.is_dir():
            raise RunError(f"{folder}: was removed while ranks wrote a checkpoint to it") from None
        return False
    report = json.loads(text) if text else {"error": "it could not even write its error; look at its output"}
    if "error" not in report:
        return True
    message = f"rank {rank}: {report['error']}"
    raise DiskFull(message, needed_bytes=int(report["needed"])) if report.get("is_full") else RunError(message)


def clear_reports(folder: Path) -> None:
    """Remove what the ranks have told each other, when the checkpoint is complete."""
    for path in folder.glob(".rank_*"):
        path.unlink()


def see_folder(folder: Path) -> None:
    """Refuse a folder that another machine does not share. It was made by the process that saves the checkpoint."""
    deadline = time.monotonic() + _SHARED_S  # a network file system may show a new folder late
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise RunError(
                f"{folder}: this rank does not see the folder of a checkpoint; run.root must be a folder that the "
                "machines of all learner ranks share, under the same path"
            )
        time.sleep(_LOOK_S)


def _report(folder: Path, rank: int) -> Path:
    return folder / f".rank_{rank:05d}.json"
