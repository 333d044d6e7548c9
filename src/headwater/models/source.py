"""What kind of model a setting such as ``model.path`` names, and where it is. This does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from headwater.config.paths import looks_like_folder
from headwater.core.errors import ModelError
from headwater.core.registry import similar_path
from headwater.models.builtin.smollm2 import fetched_folder
from headwater.models.builtin.tiny import TINY_PREFIX, find_preset
from headwater.models.folder import check_config

SMOLLM2 = "smollm2"
CONNECT_LIMIT_S = 10.0
_NO_SUCH_MODEL = (401, 403, 404)
"""The hub answers 401 for models that do not exist, because private ones look the same."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

ModelKind = Literal["folder", "hub", "tiny", "smollm2"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: ``resolve_model("tiny:qwen3")`` is ``ModelSource("tiny:qwen3", "tiny")``."""

    path: str
    """As written in the config."""
    kind: ModelKind
    key: str = "model.path"
    """The setting that names the model, for messages."""

    @property
    def folder(self) -> Path:
        """The local folder of a source of kind ``folder``."""
        if self.kind != "folder":
            raise ValueError(f"{self.path} is a {self.kind} model, not a folder")
        return Path(self.path).expanduser()


def resolve_model(path: str, key: str = "model.path") -> ModelSource:
    """Distinguish folders, hub ids, presets and ``smollm2``. The model itself is checked when it is loaded.

    ``key`` is the setting that messages name.
    """
    if path.startswith(TINY_PREFIX):
        find_preset(path, key)
        return ModelSource(path, "tiny", key)
    if path == SMOLLM2:
        return ModelSource(path, "smollm2", key)
    if looks_like_folder(path):
        return ModelSource(path, "folder", key)
    if _HUB_ID.fullmatch(path):
        return ModelSource(path, "hub", key)
    raise ModelError(
        f"{key} = {path!r}: is neither a folder nor a hub id; "
        f"give ./folder, org/name, {TINY_PREFIX}<preset> or {SMOLLM2}"
    )


def locate(source: ModelSource) -> Path | str:
    """A folder whose config.json was checked, or the id of a model that the hub has. Not for ``tiny:`` models."""
    if source.kind == "hub":
        return find_hub_model(source.path, source.key)
    location = fetched_folder(source.key) if source.kind == "smollm2" else source.folder
    check_config(location, source.key)
    return location


def check_model(path: str, key: str = "model.path") -> None:
    """Raise ``ModelError`` if there is no such model."""
    source = resolve_model(path, key)
    if source.kind != "tiny":
        locate(source)


def find_hub_model(model_id: str, key: str) -> Path | str:
    """The id itself if the hub has the model, or the folder of its downloaded copy if the hub cannot be reached."""
    from huggingface_hub import constants, try_to_load_from_cache

    problem = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _ask(constants.ENDPOINT, model_id)
    if not problem:
        return model_id
    cached = try_to_load_from_cache(model_id, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    raise ModelError(
        f"{key} = {model_id}: no such folder in {Path.cwd()}, not among the downloaded models "
        f"({constants.HF_HUB_CACHE}), and {problem}; check the name and the network, or give a local folder, "
        f"tiny:<preset> or smollm2{similar_path(Path(model_id))}"
    )


@cache
def _ask(endpoint: str, model_id: str) -> str:
    """Why the hub does not give the model; empty if it does."""
    from huggingface_hub import get_session, get_token

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url = f"{endpoint}/{model_id}/resolve/main/config.json"
    try:
        answer = get_session().head(url, headers=headers, timeout=CONNECT_LIMIT_S)
    except Exception as error:  # noqa: BLE001  its type depends on the HTTP library that huggingface_hub uses
        return f"{endpoint} cannot be reached ({type(error).__name__}: {error})"
    if answer.status_code in _NO_SUCH_MODEL:
        return f"{endpoint} has no model of that name, or your token may not read it (status {answer.status_code})"
    return ""
