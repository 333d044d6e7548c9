"""The files of a model folder that describe how it reads pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.models.folder import read_json_object

PREPROCESSOR, VIDEO_PREPROCESSOR = "preprocessor_config.json", "video_preprocessor_config.json"
PROCESSOR = "processor_config.json"
_LEGACY_TEMPLATE = "chat_template.json"
_NAMES = (PREPROCESSOR, VIDEO_PREPROCESSOR, PROCESSOR)


def read_processor_files(location: Path | str) -> dict[str, str]:
    """The contents of those files that the folder or hub model has."""
    found = {}
    for name in _NAMES:
        path = find_file(location, name)
        if path is not None:
            found[name] = path.read_text(encoding="utf-8")
    return found


def find_file(location: Path | str, name: str) -> Path | None:
    from transformers.utils import cached_file

    path = cached_file(
        location,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(path) if path is not None else None


def read_legacy_template(location: Path | str) -> str:
    """The chat template for messages with pictures, if it is not that of the tokenizer; empty otherwise."""
    path = find_file(location, _LEGACY_TEMPLATE)
    if path is None:
        return ""
    template = read_json_object(path).get("chat_template", "")
    return template if isinstance(template, str) else ""


def video_settings(files: Mapping[str, str]) -> dict[str, Any]:
    """How frames are scaled. Older models describe it together with images."""
    if VIDEO_PREPROCESSOR in files:
        return _read(files, VIDEO_PREPROCESSOR)
    nested = _read(files, PROCESSOR).get("video_processor")
    return nested if isinstance(nested, dict) else _read(files, PREPROCESSOR)


def image_processor_type(files: Mapping[str, str]) -> str:
    """The type of the image processor without the suffix of a variant; empty if the files do not tell."""
    nested = _read(files, PROCESSOR).get("image_processor")
    settings = nested if isinstance(nested, dict) else _read(files, PREPROCESSOR)
    found = settings.get("image_processor_type") or ""
    return str(found).removesuffix("Fast").removesuffix("Pil")


def _read(files: Mapping[str, str], name: str) -> dict[str, Any]:
    content = json.loads(files.get(name, "{}"))
    return content if isinstance(content, dict) else {}


def files_of(image_processor: Any, processor_class: str, video: Mapping[str, Any], **settings: Any) -> dict[str, str]:
    """The files of a built-in model. ``settings`` are those of the processor itself."""
    # A class with this suffix is the one without torchvision. Which one to use is for the reader to decide.
    name = type(image_processor).__name__.removesuffix("Pil")
    images = {**image_processor.to_dict(), "image_processor_type": name, "processor_class": processor_class}
    contents = {PREPROCESSOR: images, PROCESSOR: {"processor_class": processor_class, **settings}}
    if video:
        contents[VIDEO_PREPROCESSOR] = {**video, "processor_class": processor_class}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()}
