"""Models that give a number instead of a next token: critics and reward models.

Both are a decoder with a linear layer ``score`` with one output, as transformers names and saves them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from headwater.core.errors import ModelError
from headwater.models.device import resolve_device, resolve_dtype
from headwater.models.load import load_model, load_part, load_with, local_folder, part_with, read_config
from headwater.models.sharded_load import ShardReader
from headwater.models.source import ModelSource, locate, resolve_model

REWARD_KEY = "reward.model"
CRITIC_KEY = "critic.path"
_CLASSIFIERS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}


def load_reward_model(path: str, *, dtype: str, device: str) -> Any:
    """A sequence or token classifier with one label."""
    source = resolve_model(path, REWARD_KEY)
    classifier = _reward_classifier(path, source)
    model = load_with(classifier, locate(source), resolve_dtype(dtype, device), source.key)
    return _checked(model, f"{REWARD_KEY} = {path}").to(resolve_device(device))


def load_reward_part(path: str, *, dtype: str) -> tuple[Any, ShardReader | None]:
    """A reward model for one of several ranks; see ``load_part``."""
    source = resolve_model(path, REWARD_KEY)
    classifier = _reward_classifier(path, source)
    model, files = part_with(classifier, local_folder(source), resolve_dtype(dtype), source.key)
    if files is None:
        return load_reward_model(path, dtype=dtype, device="cpu"), None
    return _checked(model, f"{REWARD_KEY} = {path}"), files


def load_critic(path: str, *, dtype: str, device: str, seed: int) -> Any:
    """A classifier as it is, or a language model whose output layer is replaced by a value head that starts at zero."""
    source = resolve_model(path, CRITIC_KEY)
    classifier = None if source.kind == "tiny" else _classifier(source)
    if classifier is not None:
        model = load_with(classifier, locate(source), resolve_dtype(dtype, device), source.key)
        return _checked(model, f"{CRITIC_KEY} = {path}").to(resolve_device(device))
    return _with_value_head(load_model(path, dtype=dtype, device=device, seed=seed, key=CRITIC_KEY))


def load_critic_part(path: str, *, dtype: str, seed: int) -> tuple[Any, ShardReader | None]:
    """A critic for one of several ranks; see ``load_part``."""
    source = resolve_model(path, CRITIC_KEY)
    classifier = None if source.kind == "tiny" else _classifier(source)
    if classifier is None:
        model, files = load_part(path, dtype=dtype, seed=seed, key=CRITIC_KEY)
        return _with_value_head(model), files
    model, files = part_with(classifier, local_folder(source), resolve_dtype(dtype), source.key)
    if files is None:
        return load_critic(path, dtype=dtype, device="cpu", seed=seed), None
    return _checked(model, f"{CRITIC_KEY} = {path}"), files


def _with_value_head(model: Any) -> Any:
    output_layer = model.get_output_embeddings()
    for name, child in list(model.named_children()):
        if child is output_layer:
            delattr(model, name)
    width = model.config.get_text_config(decoder=True).hidden_size
    device = "cpu" if model.device.type == "meta" else model.device
    model.score = nn.Linear(width, 1, bias=False, device=device, dtype=model.dtype)
    torch.nn.init.zeros_(model.score.weight)
    return model


def _reward_classifier(path: str, source: ModelSource) -> Any:
    classifier = None if source.kind == "tiny" else _classifier(source)
    if classifier is None:
        raise ModelError(
            f"{REWARD_KEY} = {path}: not a classifier; use a model whose architecture ends in ForSequenceClassification"
        )
    return classifier


def _classifier(source: ModelSource) -> Any | None:
    names = read_config(locate(source), source.key).architectures or []
    return next((loader for ending, loader in _CLASSIFIERS.items() for name in names if name.endswith(ending)), None)


def _checked(model: Any, key: str) -> Any:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(f"{key}: must have one output, a linear layer named score with num_labels = 1")
    return model
