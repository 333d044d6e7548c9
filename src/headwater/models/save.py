"""Writing a model folder so that it is there complete or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ModelError
from headwater.models.folder import quiet

if TYPE_CHECKING:
    from torch import Tensor


def save_model(model: Any, tokenizer: Any, folder: Path | str, weights: Mapping[str, Tensor] | None = None) -> Path:
    """Save in the Hugging Face format; an existing folder is used only if it is empty.

    ``weights`` are saved in place of the model's own, by the names these have.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(
            f"cannot save the model to {target}: it exists and is not empty; remove it or name another folder"
        )
    # Beside the target, as a rename is atomic only within one file system; not by mkdtemp, whose folders are private.
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.partial"
    try:
        temporary.mkdir(parents=True)
        with quiet():
            model.save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)
        _share_weights(temporary)
        os.rename(temporary, target)
    except OSError as error:
        raise ModelError(f"cannot save the model to {target}: {error}; check free space and permissions") from error
    except ValueError as error:
        raise ModelError(f"cannot save the model to {target}: {error}; mend its generation_config.json") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _share_weights(folder: Path) -> None:
    """Let whoever may read config.json read the weights: safetensors makes its files private to the owner."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)
