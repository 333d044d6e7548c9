"""A copy of a run in another folder or in remote storage (``trainer.checkpoint_dir``), from which it can be resumed.

The copy has the run's config and records, and its newest checkpoints. The manifest of a checkpoint is uploaded last and
removed first, so a checkpoint with a manifest is complete. Any URL that fsspec understands can be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from headwater.core.disk import disk_full
from headwater.core.errors import RunError
from headwater.observe.manifest import MANIFEST
from headwater.observe.run_directory import RunDirectory, is_checkpoint_name

KEY = "trainer.checkpoint_dir"
_RECORDS = ("metrics.jsonl", "ledger.jsonl")


def is_url(place: str) -> bool:
    return "://" in place


class Mirror:
    """The copy of one run: ``<trainer.checkpoint_dir>/<name of the run>``."""

    def __init__(self, place: str, run: RunDirectory, *, key: str = KEY) -> None:
        """``place`` is the folder of this run's copy. Whether it can be reached is checked at once."""
        self._key = key
        self.place = place
        self._run = run
        with self._named(f"cannot use {place}"):
            self._files, self._root = _file_system(place)
            self._files.makedirs(self._root, exist_ok=True)

    @classmethod
    def of(cls, checkpoint_dir: str, run: RunDirectory) -> Mirror:
        return cls(f"{checkpoint_dir.rstrip('/')}/{run.path.name}", run)

    def update(self, kept: Sequence[Path]) -> None:
        """Make the copy have these checkpoints, and the config and records of the present moment."""
        with self._named(f"cannot write to {self.place}"):
            wanted = {path.name for path in kept}
            present = set(self.complete())
            for checkpoint in kept:
                if checkpoint.name not in present:
                    self._upload(checkpoint, f"checkpoints/{checkpoint.name}")
            if self._run.reference.exists() and not self._files.exists(self._at(f"reference/{MANIFEST}")):
                self._upload(self._run.reference, "reference")
            for file in (*self._run.config_files, *(self._run.path / name for name in _RECORDS)):
                if file.exists():
                    self._files.put_file(str(file), self._at(file.name))
            for name in self._names():
                if name not in wanted:
                    self._remove(f"checkpoints/{name}")

    def complete(self) -> list[str]:
        """The names of the complete checkpoints, oldest first."""
        return [name for name in self._names() if self._files.exists(self._at(f"checkpoints/{name}/{MANIFEST}"))]

    def fetch(self, step: int | None = None) -> None:
        """Download the config, the records and a checkpoint, the newest if no step is given.

        What the run directory has already is not downloaded again.
        """
        with self._named(f"cannot read {self.place}"):
            for name in self._base_names(""):
                if (name.startswith("config") and name.endswith(".yaml")) or name in _RECORDS:
                    self._download(name, self._run.path / name)
            names = self.complete()
            wanted = names[-1:] if step is None else [each for each in names if each == f"step_{step:06d}"]
            for folder in (*(f"checkpoints/{name}" for name in wanted), "reference"):
                if self._files.exists(self._at(f"{folder}/{MANIFEST}")):
                    self._download_folder(folder)

    def _names(self) -> list[str]:
        return sorted(name for name in self._base_names("checkpoints") if is_checkpoint_name(name))

    def _base_names(self, folder: str) -> list[str]:
        place = self._at(folder)
        self._files.invalidate_cache()
        found = self._files.ls(place, detail=False) if self._files.exists(place) else []
        return [PurePosixPath(str(each)).name for each in found]

    def _upload(self, folder: Path, name: str) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for file in sorted(files, key=lambda each: each.name == MANIFEST):  # the manifest comes last
            target = self._at(f"{name}/{file.relative_to(folder).as_posix()}")
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(file), target)

    def _remove(self, folder: str) -> None:
        if self._files.exists(manifest := self._at(f"{folder}/{MANIFEST}")):
            self._files.rm_file(manifest)
        self._files.rm(self._at(folder), recursive=True)

    def _download_folder(self, folder: str) -> None:
        """Under a temporary name, so that a folder that exists is complete."""
        target = self._run.path / folder
        if (target / MANIFEST).is_file():
            return
        temporary = target.with_name(f".{target.name}")
        root = self._at(folder)
        for found in self._files.find(root):
            name = str(found)[str(found).index(root.lstrip("/")) + len(root.lstrip("/")) :].lstrip("/")
            self._download(f"{folder}/{name}", temporary / name)
        temporary.replace(target)

    def _download(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            self._files.get_file(self._at(name), str(target))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except Exception as error:  # each storage has errors of its own
            if not is_url(self.place) and (full := disk_full(error, Path(self.place), "the copy of a checkpoint")):
                raise full from error
            remedy = "check the address, the credentials and the free space, or leave the setting empty"
            raise RunError(f"{self._key} = {self.place}: {what} ({type(error).__name__}: {error}); {remedy}") from error


def local_run(place: str, root: Path = Path("runs")) -> Path:
    """The run directory that ``--resume`` names. Of a URL, a copy is downloaded to ``root``."""
    if not is_url(place):
        return Path(place).expanduser()
    run = RunDirectory(root / place.rstrip("/").rpartition("/")[2])
    Mirror(place, run, key="--resume").fetch()
    return run.path


def fetch_missing(run: RunDirectory, checkpoint_dir: str, step: int | None) -> None:
    """Download a checkpoint that the run directory has lost: that of ``step``, or the newest if it has none."""
    has_it = bool(run.checkpoint_steps()) if step is None else step in run.checkpoint_steps()
    if checkpoint_dir and not has_it and not is_same_place(checkpoint_dir, run):
        Mirror.of(checkpoint_dir, run).fetch(step)


def is_same_place(checkpoint_dir: str, run: RunDirectory) -> bool:
    """Whether the run directory is the copy itself: a run may be resumed inside a local copy."""
    return not is_url(checkpoint_dir) and Path(checkpoint_dir).resolve() == run.path.resolve().parent


def _file_system(place: str) -> tuple[Any, str]:
    import fsspec  # a dependency of torch

    files, root = fsspec.core.url_to_fs(place)
    return files, str(root).rstrip("/")
