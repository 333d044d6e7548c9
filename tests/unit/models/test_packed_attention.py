"""Which models can be trained on packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CohereConfig,
    DeepseekV2Config,
    Gemma2Config,
    GPT2Config,
    GPTBigCodeConfig,
    GraniteConfig,
    Lfm2Config,
    ModernBertDecoderConfig,
    NemotronConfig,
    RecurrentGemmaConfig,
)

from headwater.config.schema import LearnerConfig
from headwater.core.errors import ModelError
from headwater.learner.engine import ForwardEngine
from headwater.learner.packed_module import PolicyModule
from headwater.models import packed_attention
from headwater.models.packed_attention import AttentionTables, Segments, repeat_prefixes, use_packed_attention
from headwater.rollout.group import pad_trajectories

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


def test_a_model_whose_log_probs_would_be_wrong_is_refused_by_name() -> None:
    for config, message in (
        (GraniteConfig(**SHAPE, logits_scaling=8.0), r"granite: logits_scaling = 8\.0 changes the logits"),
        (CohereConfig(**SHAPE), r"cohere: logit_scale = 0\.0625 changes the logits"),
        (Gemma2Config(**SHAPE), r"gemma2: final_logit_softcapping = 30\.0 changes the logits"),
        (Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]), "lfm2: layer_types has .*conv"),
        (RecurrentGemmaConfig(**SHAPE), "recurrent_gemma: layers_block_type has recurrent"),
    ):
        with pytest.raises(ModelError, match=f"{message}.*; use a model"):
            use_packed_attention(AutoModelForCausalLM.from_config(config))


def test_long_sequences_are_computed_without_a_mask(monkeypatch) -> None:
    """Beside short ones and segments that share a prefix, and with the same gradients."""
    lengths, prefixes = np.array([40, 40, 6, 9]), np.array([0, 0, 0, 6])
    starts = np.array([0, 40, 80, 86])
    segments = Segments(starts, lengths, np.array([0, 0, 0, 80]), prefixes)
    inputs = [torch.randn(95, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 1)]
    inputs[2] = inputs[2].expand(95, 2, 16)

    def attend(long: int) -> list[torch.Tensor]:
        monkeypatch.setattr(packed_attention, "_LONG", long)
        given = [each.clone().requires_grad_() for each in inputs]
        output = packed_attention.BucketedAttention(segments, torch.device("cpu"))(*given, scale=0.25, window=0)
        output.square().sum().backward()
        return [output.detach(), *(each.grad for each in given)]

    for masked, causal in zip(attend(1000), attend(20), strict=True):
        torch.testing.assert_close(causal, masked)


def test_what_changes_nothing_is_accepted() -> None:
    use_packed_attention(AutoModelForCausalLM.from_config(GraniteConfig(**SHAPE, logits_scaling=1.0)))


def test_a_model_without_logits_is_not_asked_about_them() -> None:
    config = Gemma2Config(**SHAPE, num_labels=1)
    use_packed_attention(AutoModelForSequenceClassification.from_config(config))


def test_a_decoder_without_a_list_of_layers_is_refused_by_name() -> None:
    for config in (
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2),
        GPTBigCodeConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2),
        ModernBertDecoderConfig(**SHAPE, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    ):
        with pytest.raises(ModelError, match=f"^{config.model_type}: .* a list named layers.*; use a Llama"):
            PolicyModule(AutoModelForCausalLM.from_config(config), 1.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NemotronConfig(**{**SHAPE, "vocab_size": 512}), "nemotron: its layers do not pass on"),
        (
            DeepseekV2Config(**{**SHAPE, "vocab_size": 512, "num_key_value_heads": 2, "head_dim": 64}),
            r"deepseek_v2: its values and queries have different widths \(128 and 192\)",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_only_a_pass_can_show_is_refused_by_name_at_the_first(config: Any, message: str) -> None:
    engine = ForwardEngine(PolicyModule(AutoModelForCausalLM.from_config(config), 1.0), LearnerConfig())
    with pytest.raises(ModelError, match=f"^{message}.*; use a Llama"):
        engine.compute(pad_trajectories([tiny.trajectory(1)], pad_token_id=0))


def shared_prompts(samples: list[list[int]]) -> Segments:
    """One prompt per list, of 3 tokens more than the one before, and responses of the given lengths."""
    segments: list[tuple[int, int, int, int]] = []
    end = 0
    for number, lengths in enumerate(samples):
        prompt, prompt_length = end, 2 + 3 * number
        if len(lengths) == 1:  # a prompt that nobody shares belongs to its response
            segments.append((prompt, prompt_length + lengths[0], prompt, 0))
            end += prompt_length + lengths[0]
            continue
        segments.append((prompt, prompt_length, prompt, 0))
        end += prompt_length
        for length in lengths:
            segments.append((end, length, prompt, prompt_length))
            end += length
    return Segments(*np.array(segments, np.int64).T)


@pytest.mark.parametrize("samples", [[[4, 1, 3]], [[2, 2], [5], [1, 3, 2, 4]], [[3], [2, 6]]])
def test_the_gradient_of_repeated_prefixes_is_that_of_indexing(samples: list[list[int]]) -> None:
    segments = shared_prompts(samples)
    num_tokens, key_places = int(segments.lengths.sum()), torch.from_numpy(segments.all_key_places())
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(num_tokens, 2, 3, generator=generator, dtype=torch.float64)
    upstream = torch.randn(len(key_places), 2, 3, generator=generator, dtype=torch.float64)
    ours, plain = tensor.clone().requires_grad_(), tensor.clone().requires_grad_()
    repeated = repeat_prefixes(ours, key_places, segments.copies())
    assert torch.equal(repeated, plain[key_places])
    repeated.backward(upstream)
    plain[key_places].backward(upstream)
    torch.testing.assert_close(ours.grad, plain.grad)
    # In a narrow type, the sum of all copies is rounded once.
    narrow = tensor.bfloat16().requires_grad_()
    repeat_prefixes(narrow, key_places, segments.copies()).backward(upstream.bfloat16())
    exact = torch.zeros_like(tensor).index_add_(0, key_places, upstream.bfloat16().double())
    assert torch.equal(narrow.grad, exact.float().bfloat16())


def test_a_pack_without_shared_prompts_repeats_nothing() -> None:
    assert AttentionTables.of(shared_prompts([[3], [4]]), torch.device("cpu")).key_places is None
    assert AttentionTables.of(shared_prompts([[3], [4, 1]]), torch.device("cpu")).key_places is not None


def test_gradients_reach_the_projections_without_a_copy() -> None:
    """They have the layout of the projections' results, ``[tokens, heads, head dim]``."""
    projected = [torch.randn(1, 5, heads, 4, requires_grad=True) for heads in (3, 1, 1)]
    seen: list[torch.Tensor] = []
    states = [each.transpose(1, 2) for each in projected]
    for each in states:
        each.register_hook(seen.append)
    layer = torch.nn.Module()
    output, _ = packed_attention.attend(
        layer, *states, None, packed_attention=lambda query, key, value, **_: query * (key + value)
    )
    output.sum().backward()
    assert len(seen) == 3
    assert all(each.transpose(1, 2).is_contiguous() for each in seen)
