"""Images and videos of a row, from whatever the data file holds."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


def as_list(value: Any) -> list[Any]:
    """A column with one image need not wrap it in a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def load_image(value: Any, where: str, folder: Path | None) -> Image:
    """An RGB image from a path, encoded bytes, ``{"bytes": ...}``, ``{"path": ...}`` or a Pillow image."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{where}: images need Pillow; pip install headwater[vision]") from error
    try:
        opened = value if isinstance(value, Image.Image) else Image.open(_stream(value, where, folder))
        return opened.convert("RGB")
    except OSError as error:
        raise DataError(f"{where}: not a readable image ({error}); mend or remove it") from error


def load_video(value: Any, where: str, folder: Path | None) -> Any:
    """Frames given one by one become images; a path is checked, and like anything else left to the processor."""
    if isinstance(value, (list, tuple)):
        return [load_image(frame, f"{where} frame {number}", folder) for number, frame in enumerate(value)]
    return str(_existing(value, where, folder)) if isinstance(value, str) else value


def _stream(value: Any, where: str, folder: Path | None) -> io.BytesIO | Path:
    if isinstance(value, Mapping):
        # The layout of datasets.Image: a path that stands beside bytes is only the name of the original.
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if isinstance(value, (str, Path)):
        return _existing(str(value), where, folder)
    hint = "give a path, {'bytes': ...}, {'path': ...} or a Pillow image"
    raise DataError(f"{where}: a {type(value).__name__} is not an image; {hint}")


def _existing(name: str, where: str, folder: Path | None) -> Path:
    tried: Sequence[Path] = [start / Path(name).expanduser() for start in (folder, Path()) if start is not None]
    for path in tried:
        if path.is_file():
            return path
    looked = " and ".join(str(path) for path in tried)
    raise DataError(f"{where}: no such file: {looked}; relative paths start at the data file's folder")
