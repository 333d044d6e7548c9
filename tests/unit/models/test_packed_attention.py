"""Which models can be trained on packs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    Lfm2Config,
)

from headwater.core.errors import ModelError
from headwater.models.packed_attention import use_packed_attention

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GraniteConfig(**SHAPE, logits_scaling=8.0), r"granite: logits_scaling = 8\.0 changes the logits"),
        (CohereConfig(**SHAPE), r"cohere: logit_scale = 0\.0625 changes the logits"),
        (Gemma2Config(**SHAPE), r"gemma2: final_logit_softcapping = 30\.0 changes the logits"),
        (Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]), "lfm2: layer_types has .*conv"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_whose_log_probs_would_be_wrong_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=f"{message}.*; use a model"):
        use_packed_attention(AutoModelForCausalLM.from_config(config))


def test_what_changes_nothing_is_accepted() -> None:
    use_packed_attention(AutoModelForCausalLM.from_config(GraniteConfig(**SHAPE, logits_scaling=1.0)))


def test_a_model_without_logits_is_not_asked_about_them() -> None:
    config = Gemma2Config(**SHAPE, num_labels=1)
    use_packed_attention(AutoModelForSequenceClassification.from_config(config))
