"""Checks of a model folder before transformers reads it, so that the message names the damaged file.

``key`` is the setting that names the folder, for messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headwater.core.errors import ModelError
from headwater.core.registry import similar_path

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZER_PATTERNS = ("tokenizer.json", "tokenizer.model", "vocab.*", "spiece.model", "*.tiktoken", "tekken.json")


def check_config(folder: Path, key: str = "model.path") -> None:
    """Check that the folder exists and that its config.json can be read."""
    if not folder.exists():
        raise ModelError(
            f"{key} = {folder}: no such folder; check the path, or write org/name for a hub model{similar_path(folder)}"
        )
    if not folder.is_dir():
        raise ModelError(f"{key} = {folder}: is a file; give the folder that contains config.json and the weights")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{key} = {folder}: has no config.json; give a folder in the Hugging Face format (save_pretrained)"
        )
    read_json_object(folder / "config.json")


def check_weights(folder: Path, key: str = "model.path") -> None:
    """Check that every weight file that loading needs exists and is complete."""
    for file in weight_files(folder, key):
        if not file.is_file():
            raise ModelError(f"{file}: is missing, but {_WEIGHTS_INDEX} lists it; copy the model folder again")
        try:
            # Opening reads the header and compares it with the file's length. No weight is read.
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: is damaged or truncated ({error}); copy the model folder again") from error


def check_tokenizer(folder: Path, key: str = "model.path") -> None:
    """Check that there is a tokenizer. Transformers would create an empty one for some architectures."""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_PATTERNS):
        raise ModelError(
            f"{key} = {folder}: has no tokenizer; copy the tokenizer files (tokenizer.json and "
            "tokenizer_config.json) of the model into it"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json_object(folder / name)


def is_self_described(folder: Path) -> bool:
    """Whether tokenizer.json describes the tokenizer completely.

    For some architectures, such as qwen2, ``AutoTokenizer`` would still replace the saved pre-tokenizer by the
    architecture's own, which changes the tokens.
    """
    settings = folder / "tokenizer_config.json"
    if not (settings.is_file() and (folder / "tokenizer.json").is_file()):
        return False
    return read_json_object(settings).get("tokenizer_class") == "TokenizersBackend"


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block transformers shows no progress bars and logs only errors. Problems become a ``ModelError``."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def read_json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error}); copy the model folder again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: contains a {type(value).__name__}, not an object; copy the model folder again")
    return value


def weight_files(folder: Path, key: str = "model.path") -> list[Path]:
    """The safetensors files of a model folder; none if its weights are pickled."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _WEIGHTS_INDEX).is_file():
        weight_map = read_json_object(folder / _WEIGHTS_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / _WEIGHTS_INDEX}: has no weight_map; copy the model folder again")
        return [folder / str(name) for name in sorted(set(weight_map.values()))]
    if any((folder / name).is_file() for name in _PICKLED_WEIGHTS):
        return []
    raise ModelError(f"{key} = {folder}: has no weights; {_WEIGHTS} or {_WEIGHTS_INDEX} must be next to config.json")
