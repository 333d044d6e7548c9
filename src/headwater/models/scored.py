"""Models that give a number instead of a next token: critics and reward models.

Both are a decoder with a linear layer ``score`` of one output, which is how transformers names and saves them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from headwater.core.errors import ModelError
from headwater.models.device import resolve_device, resolve_dtype
from headwater.models.load import load_model, load_with, locate, read_config
from headwater.models.source import resolve_model

_CLASSIFIERS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}


def load_reward_model(path: str, *, dtype: str, device: str) -> Any:
    """A sequence or token classifier with one label."""
    source = resolve_model(path)
    classifier = None if source.kind == "tiny" else _classifier(locate(source))
    if classifier is None:
        raise ModelError(
            f"reward.model = {path}: no classifier; give a model whose architecture ends in ForSequenceClassification"
        )
    model = load_with(classifier, locate(source), resolve_dtype(dtype))
    return _checked(model, f"reward.model = {path}").to(resolve_device(device))


def load_critic(path: str, *, dtype: str, device: str, seed: int) -> Any:
    """A classifier as it is, or a language model whose output layer gives way to a value head that starts at zero."""
    source = resolve_model(path)
    classifier = None if source.kind == "tiny" else _classifier(locate(source))
    if classifier is not None:
        model = load_with(classifier, locate(source), resolve_dtype(dtype))
        return _checked(model, f"critic.path = {path}").to(resolve_device(device))
    model = load_model(path, dtype=dtype, device=device, seed=seed)
    output_layer = model.get_output_embeddings()
    for name, child in list(model.named_children()):
        if child is output_layer:
            delattr(model, name)
    width = model.config.get_text_config(decoder=True).hidden_size
    model.score = nn.Linear(width, 1, bias=False, device=model.device, dtype=model.dtype)
    torch.nn.init.zeros_(model.score.weight)
    return model


def _classifier(location: Any) -> Any | None:
    names = read_config(location).architectures or []
    return next((loader for ending, loader in _CLASSIFIERS.items() for name in names if name.endswith(ending)), None)


def _checked(model: Any, key: str) -> Any:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(f"{key}: must have one output, a linear layer named score with num_labels = 1")
    return model
