"""A copy of a run in another folder or in remote storage (``trainer.checkpoint_dir``), from which it can be resumed.

The copy has the run's id, config and records, and its newest checkpoints. The manifest of a checkpoint is uploaded last
and removed first, so a checkpoint with a manifest is complete. Any URL that fsspec understands can be used.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from headwater.core.disk import disk_full
from headwater.core.errors import CopyFailed, HeadwaterError, RunError
from headwater.observe.manifest import MANIFEST
from headwater.observe.run_directory import RunDirectory, is_checkpoint_name, set_aside
from headwater.observe.run_lock import RunLock

logger = logging.getLogger(__name__)

KEY = "trainer.checkpoint_dir"
_RECORDS = ("metrics.jsonl", "ledger.jsonl")


def is_url(place: str) -> bool:
    return "://" in place


class Mirror:
    """The copy of one run: ``<trainer.checkpoint_dir>/<name of the run>``."""

    def __init__(self, place: str, run: RunDirectory, *, key: str = KEY) -> None:
        """``place`` is the folder of this run's copy. Whether it can be reached, and is no other run's, is checked."""
        self._key = key
        self.place = place
        self._run = run
        with self._named(f"cannot use {place}"):
            self._files, self._root = _file_system(place)
            if key == KEY:
                self._files.makedirs(self._root, exist_ok=True)
            self._check_owner()

    @classmethod
    def of(cls, checkpoint_dir: str, run: RunDirectory) -> Mirror:
        return cls(f"{checkpoint_dir.rstrip('/')}/{run.path.name}", run)

    def update(self, kept: Sequence[Path], *, num_newest: int = 0, best: str = "") -> None:
        """Make the copy have these checkpoints, and the config and records of the present moment.

        Of the other checkpoints in the copy, those stay that are among the ``num_newest`` newest ones, or are ``best``:
        a run that was resumed from its copy has downloaded only one of them.
        """
        with self._named(f"cannot write to {self.place}"):
            self._check_owner()
            if self._run.id_file.exists() and not self._files.exists(self._at(self._run.id_file.name)):
                self._files.put_file(str(self._run.id_file), self._at(self._run.id_file.name))
            for checkpoint in kept:
                self._upload(checkpoint, f"checkpoints/{checkpoint.name}")
            if (self._run.reference / MANIFEST).is_file():
                self._upload(self._run.reference, "reference")
            for file in (*self._run.config_files, *(self._run.path / name for name in _RECORDS)):
                if file.exists():
                    self._files.put_file(str(file), self._at(file.name))
            complete = self.complete()
            wanted = {best, *(path.name for path in kept), *complete[max(0, len(complete) - num_newest) :]}
            for name in self._names():
                if name not in wanted or name not in complete:
                    self._remove(f"checkpoints/{name}")

    def complete(self) -> list[str]:
        """The names of the complete checkpoints, oldest first."""
        return [name for name in self._names() if self._files.exists(self._at(f"checkpoints/{name}/{MANIFEST}"))]

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        with self._named(f"cannot read {self.place}"):
            return [_step(name) for name in self.complete()]

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints later than ``step``, because the run continues from there and will write new ones."""
        with self._named(f"cannot write to {self.place}"):
            for later in (name for name in self._names() if _step(name) > step):
                number, others = 1, self._base_names("checkpoints")
                while (aside := f"superseded-{number}_{later}") in others:
                    number += 1
                files = self._files_below(f"checkpoints/{later}")
                for file in sorted(files, key=lambda each: each != MANIFEST):  # first: the rest does not count without
                    target = self._at(f"checkpoints/{aside}/{file}")
                    self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                    self._files.mv(self._at(f"checkpoints/{later}/{file}"), target)
                if self._files.exists(left := self._at(f"checkpoints/{later}")):
                    self._files.rm(left, recursive=True)  # folders that are empty now
                logger.warning("%s: the later checkpoint %s is now %s", self.place, later, aside)

    def exists(self) -> bool:
        with self._named(f"cannot read {self.place}"):
            return bool(self._files.exists(self._at("config.yaml")))

    def fetch(self, step: int | None = None) -> None:
        """Download the config, the records and a checkpoint, the newest if no step is given.

        What the run directory has already is not downloaded again. If its records are not those of the copy, or end
        earlier, they and the config are replaced.
        """
        with self._named(f"cannot read {self.place}"):
            names = self.complete()
            if not self._is_older():
                self._replace_records(max(map(_step, names), default=-1))
            wanted = names[-1:] if step is None else [each for each in names if each == f"step_{step:06d}"]
            for folder in (*(f"checkpoints/{name}" for name in wanted), "reference"):
                if self._files.exists(self._at(f"{folder}/{MANIFEST}")):
                    self._download_folder(folder)

    def _check_owner(self) -> None:
        """Refuse the copy of another run that has the same name."""
        here = self._run.id_file.read_bytes() if self._run.id_file.exists() else b""
        is_there = self._files.exists(self._at("config.yaml")) or self._files.exists(self._at(self._run.id_file.name))
        is_here = bool(here) or (self._run.path / "config.yaml").exists()
        if is_here and is_there and here != self._content(self._run.id_file.name):
            what = f"{self._key} = {self.place}: has the copy of another run than {self._run.path}"
            if self._key != KEY:
                raise RunError(f"{what}; move that folder away, or resume in another working directory")
            remedy = f"set another run.name (now {self._run.path.name}), or continue it with --resume {self.place}"
            raise RunError(f"{what}; {remedy}")

    def _is_older(self) -> bool:
        """Whether the run directory has the config and all records of the copy, and perhaps more."""
        has_config = (self._run.path / "config.yaml").exists()
        return has_config and all(_content(self._run.path / name).startswith(self._content(name)) for name in _RECORDS)

    def _replace_records(self, newest_there: int) -> None:
        newest = max(self._run.checkpoint_steps(), default=-1)
        if newest > newest_there:
            raise RunError(
                f"{self._key} = {self.place}: {self._run.path} has other records and a later checkpoint, that of step "
                f"{newest}; to continue it, resume {self._run.path}; to continue the copy, move it away"
            )
        there = [name for name in self._base_names("") if name.startswith("config") and name.endswith(".yaml")]
        there += [name for name in (self._run.id_file.name, *_RECORDS) if self._files.exists(self._at(name))]
        for name in there:
            self._download(name, self._run.path / name)
        for file in (*self._run.config_files, *(self._run.path / name for name in _RECORDS)):
            if file.name not in there:
                file.unlink(missing_ok=True)

    def _names(self) -> list[str]:
        return sorted((name for name in self._base_names("checkpoints") if is_checkpoint_name(name)), key=_step)

    def _base_names(self, folder: str) -> list[str]:
        place = self._at(folder)
        self._files.invalidate_cache()
        found = self._files.ls(place, detail=False) if self._files.exists(place) else []
        return [PurePosixPath(str(each)).name for each in found]

    def _files_below(self, folder: str) -> list[str]:
        """The names of all files of a folder, relative to it."""
        root = self._at(folder).lstrip("/")
        found = [str(each) for each in self._files.find(self._at(folder))]
        return [each[each.index(root) + len(root) :].lstrip("/") for each in found]

    def _upload(self, folder: Path, name: str) -> None:
        """Upload a folder that has a manifest, unless the copy has it. Another one of that name is removed first."""
        if self._content(f"{name}/{MANIFEST}") == _content(folder / MANIFEST):
            return
        if self._files.exists(self._at(name)):
            self._remove(name)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for file in sorted(files, key=lambda each: each.name == MANIFEST):  # the manifest comes last
            target = self._at(f"{name}/{file.relative_to(folder).as_posix()}")
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(file), target)

    def _remove(self, folder: str) -> None:
        if self._files.exists(manifest := self._at(f"{folder}/{MANIFEST}")):
            self._files.rm_file(manifest)
        if self._files.exists(self._at(folder)):  # in some storages, a folder ends with its last file
            self._files.rm(self._at(folder), recursive=True)

    def _download_folder(self, folder: str) -> None:
        """Under a temporary name, so that a folder that exists is complete."""
        target = self._run.path / folder
        if _content(target / MANIFEST) == self._content(f"{folder}/{MANIFEST}"):
            return
        temporary = target.with_name(f".{target.name}")
        shutil.rmtree(temporary, ignore_errors=True)  # of a download that was broken off
        for name in self._files_below(folder):
            self._download(f"{folder}/{name}", temporary / name)
        if target.exists():  # not complete, or written by another process that continued the run
            set_aside(target)
        temporary.replace(target)

    def _download(self, name: str, target: Path) -> None:
        """Under a temporary name, so that a file that exists is complete."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.part")
        self._files.get_file(self._at(name), str(temporary))
        temporary.replace(target)

    def _content(self, name: str) -> bytes:
        """Of a small file in the copy; empty if there is none."""
        self._files.invalidate_cache()
        return bytes(self._files.cat_file(self._at(name))) if self._files.exists(self._at(name)) else b""

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except HeadwaterError:
            raise
        except Exception as error:  # each storage has its own errors
            if not is_url(self.place) and (full := disk_full(error, Path(self.place), "the copy of a checkpoint")):
                raise full from error
            remedy = "check the address, the credentials and the free space, or leave the setting empty"
            text = f"{self._key} = {self.place}: {what} ({type(error).__name__}: {error}); {remedy}"
            raise CopyFailed(text) from error


def local_run(place: str, root: Path = Path("runs"), *, key: str = "--resume", step: str = "") -> Path:
    """The run directory that ``key`` names. Of a URL, a copy is downloaded to ``root``.

    ``step`` is as in ``find_checkpoint``: the checkpoint of that step is downloaded, all of them to find the best one,
    or the newest.
    """
    if not is_url(place):
        return Path(place).expanduser()
    run = RunDirectory(root / place.rstrip("/").rpartition("/")[2])
    mirror = Mirror(place, run, key=key)
    if not _fetch_whole(mirror, run, step):
        raise RunError(f"{key} = {place}: no copy of a run (config.yaml is missing); check the address")
    return run.path


def fetch_lost(run: RunDirectory, checkpoint_dir: str) -> bool:
    """Download a run that this machine does not have, if there is a copy of it. Returns whether there is."""
    if not checkpoint_dir or is_same_place(checkpoint_dir, run):
        return False
    return _fetch_whole(Mirror.of(checkpoint_dir, run), run)


def _fetch_whole(mirror: Mirror, run: RunDirectory, step: str = "") -> bool:
    if not mirror.exists():
        return False
    wanted: Sequence[int | None] = mirror.steps() if step == "best" else [int(step)] if step.isdecimal() else []
    run.path.mkdir(parents=True, exist_ok=True)
    with RunLock(run.lock_file):
        for each in wanted or [None]:
            mirror.fetch(each)
    return True


def fetch_missing(run: RunDirectory, checkpoint_dir: str, step: int | None) -> bool:
    """Download a checkpoint that the run directory has lost: that of ``step``, or the newest if it has none.

    Returns whether the run directory may have changed.
    """
    has_it = bool(run.checkpoint_steps()) if step is None else step in run.checkpoint_steps()
    if not checkpoint_dir or has_it or is_same_place(checkpoint_dir, run):
        return False
    Mirror.of(checkpoint_dir, run).fetch(step)
    return True


def is_same_place(checkpoint_dir: str, run: RunDirectory) -> bool:
    """Whether the run directory is the copy itself: a run may be resumed inside a local copy."""
    return not is_url(checkpoint_dir) and Path(checkpoint_dir).resolve() == run.path.resolve().parent


def _step(name: str) -> int:
    return int(name.removeprefix("step_"))


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _file_system(place: str) -> tuple[Any, str]:
    import fsspec  # a dependency of torch

    files, root = fsspec.core.url_to_fs(place)
    return files, str(root).rstrip("/")
