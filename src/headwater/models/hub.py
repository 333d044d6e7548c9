"""Whether a model can be had from the hub, asked once and briefly before transformers tries for minutes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from headwater.core.errors import ModelError
from headwater.core.registry import similar_path

CONNECT_LIMIT_S = 10.0
_NO_SUCH_MODEL = (401, 403, 404)
"""The hub answers 401 for models that do not exist, because private ones look the same."""


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
