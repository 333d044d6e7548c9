"""Checks of a model folder before transformers reads it, so that a damaged file is named and not guessed at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headwater.core.errors import ModelError

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZER_PATTERNS = ("tokenizer.json", "tokenizer.model", "vocab.*", "spiece.model", "*.tiktoken", "tekken.json")


def check_config(folder: Path) -> None:
    """The folder is there and its config.json can be read."""
    if not folder.exists():
        raise ModelError(f"model.path = {folder}: no such folder; check the path, or write org/name for a hub model")
    if not folder.is_dir():
        raise ModelError(f"model.path = {folder}: is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path = {folder}: has no config.json; give a folder in the Hugging Face format (save_pretrained)"
        )
    read_json_object(folder / "config.json")


def check_weights(folder: Path) -> None:
    """Every weight file that loading would need is there and complete."""
    for file in _weight_files(folder):
        if not file.is_file():
            raise ModelError(f"{file}: missing, though {_WEIGHTS_INDEX} names it; copy the model folder again")
        try:
            # Opening reads the header and compares the file's length with it; no weight is read yet.
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: damaged or cut short ({error}); copy the model folder again") from error


def check_tokenizer(folder: Path) -> None:
    """There is a tokenizer: without this check transformers makes up an empty one for some architectures."""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_PATTERNS):
        raise ModelError(
            f"model.path = {folder}: has no tokenizer; copy the tokenizer files (tokenizer.json and "
            "tokenizer_config.json) of the model into it"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json_object(folder / name)


def is_self_described(folder: Path) -> bool:
    """Whether tokenizer.json says all there is to know about the tokenizer.

    For some architectures (qwen2 among them) ``AutoTokenizer`` distrusts this and puts the architecture's own
    pre-tokenizer in place of the saved one, so that the same text gets other tokens.
    """
    settings = folder / "tokenizer_config.json"
    if not (settings.is_file() and (folder / "tokenizer.json").is_file()):
        return False
    return read_json_object(settings).get("tokenizer_class") == "TokenizersBackend"


def read_json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error}); copy the model folder again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: holds a {type(value).__name__}, not an object; copy the model folder again")
    return value


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _WEIGHTS_INDEX).is_file():
        weight_map = read_json_object(folder / _WEIGHTS_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / _WEIGHTS_INDEX}: has no weight_map; copy the model folder again")
        return [folder / str(name) for name in sorted(set(weight_map.values()))]
    if any((folder / name).is_file() for name in _PICKLED_WEIGHTS):
        return []
    raise ModelError(
        f"model.path = {folder}: has no weights; {_WEIGHTS} or {_WEIGHTS_INDEX} must stand beside config.json"
    )
