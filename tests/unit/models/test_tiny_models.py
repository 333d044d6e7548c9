from __future__ import annotations

from typing import Any

import pytest
import torch

from headwater.core.errors import ModelError
from headwater.models.builtin.tiny import PRESETS
from headwater.models.load import end_token_ids, load_model, load_processor, load_tokenizer
from headwater.models.vision import is_vision


def build(name: str = "qwen3", seed: int = 0, dtype: str = "float32") -> Any:
    return load_model(f"tiny:{name}", dtype=dtype, device="cpu", seed=seed)


def same_weights(left: Any, right: Any) -> bool:
    other = right.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in left.state_dict().items())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_builds_runs_and_agrees_with_its_tokenizer(name: str) -> None:
    model, tokenizer, preset = build(name), load_tokenizer(f"tiny:{name}"), PRESETS[name]
    tokens = torch.tensor([tokenizer.encode("What is 7 + 5?")])
    with torch.no_grad():
        logits = model(tokens).logits
    assert logits.shape == (1, tokens.shape[1], len(tokenizer))
    assert torch.isfinite(logits).all()
    assert model.config.model_type == preset.architecture
    text_config, decoder = model.config.get_text_config(), model.get_decoder()
    assert text_config.num_hidden_layers == preset.num_layers
    assert decoder.layers[0].self_attn.k_proj.weight.shape == (
        preset.num_kv_heads * preset.head_dim,
        preset.hidden_size,
    )
    assert model.lm_head.weight is decoder.embed_tokens.weight
    assert not model.training
    for config in (text_config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert end_token_ids(model, tokenizer) == (1,)
    assert (load_processor(f"tiny:{name}") is not None) == is_vision(model.config)


def test_generation_stops_at_the_end_token() -> None:
    model, prompt = build(), torch.tensor([[4, 20, 21]])
    assert model.generate(prompt, max_new_tokens=5, do_sample=False).shape == (1, 8)
    with torch.no_grad():
        # Turn the end token's output row towards the hidden state, so that it is by far the likeliest.
        model.lm_head.weight[1] = model.model(prompt).last_hidden_state[0, -1]
    assert model.generate(prompt, max_new_tokens=5, do_sample=False).tolist() == [[4, 20, 21, 1]]


def test_same_seed_gives_the_same_weights_whatever_ran_before() -> None:
    first = build(seed=3)
    torch.manual_seed(99)
    torch.randn(17)
    torch.set_default_dtype(torch.float64)
    try:
        second = build(seed=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_weights(first, second)
    assert not same_weights(first, build(seed=4))


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.randn(4)
    torch.manual_seed(5)
    build(seed=1)
    assert torch.equal(torch.randn(4), expected)


def test_other_dtypes_are_the_same_weights_rounded() -> None:
    full, half = build(dtype="float32"), build(dtype="bfloat16")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.config.dtype == torch.bfloat16
    assert same_weights(full.to(torch.bfloat16), half)


def test_unknown_preset_names_the_known_ones() -> None:
    for load in (load_tokenizer, load_processor, lambda path: build(path.removeprefix("tiny:"))):
        with pytest.raises(
            ModelError, match=r"tiny:qwen33: unknown preset 'qwen33'; did you mean 'qwen3'\? known: .*llama, "
        ):
            load("tiny:qwen33")


def test_rotary_frequencies_stay_in_float32_as_from_pretrained_keeps_them() -> None:
    model, exact = build(dtype="bfloat16"), build()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)
    assert model.lm_head.weight is model.model.embed_tokens.weight
