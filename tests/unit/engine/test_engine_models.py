"""The engine against transformers, architecture by architecture."""

from __future__ import annotations

import pytest
import torch
from cases import case
from engine.engine_parts import (
    KINDS,
    assert_same,
    build,
    distribution,
    full_pass,
    logits_after,
    make_model,
    reference,
    request,
    running,
    tokens_of,
)
from tiny import tokenizer
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, MixtralConfig

from headwater.config.schema import EngineConfig
from headwater.core.errors import ModelError
from headwater.engine.engine import Engine
from headwater.engine.model_spec import FUSED, SUPPORTED
from headwater.engine.runners.decoder import CpuOps
from headwater.engine.runners.plain import Runner

LENGTHS = (1, 16, 17, 40)
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def generated(model, prompt, max_new_tokens, **settings):
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=max_new_tokens, **settings
    )
    return output[0, len(prompt) :].tolist()


def test_every_supported_architecture_is_tested_here():
    assert {make_model(kind).config.model_type for kind in KINDS} == set(SUPPORTED)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate_and_logprobs_equal_a_full_forward_pass(kind):
    greedy = [request(tokens_of(length), temperature=0.0, max_new_tokens=16) for length in LENGTHS]
    sampled = [
        request(tokens_of(length), key, max_new_tokens=12, **SETTINGS["hot" if key % 2 else "plain"])
        for key, length in enumerate(LENGTHS)
    ]
    with running(make_model(kind)) as engine:
        responses = engine.generate([*greedy, *sampled])
    expected = [generated(reference(kind), each.input_tokens, 16, eos_token_id=None) for each in greedy]
    assert [list(each.output_tokens) for each in responses[: len(greedy)]] == expected
    assert len({token for tokens in expected for token in tokens}) > 12, "the model always predicts the same tokens"
    for asked, response in zip(sampled, responses[len(greedy) :], strict=True):
        logprobs = full_pass(reference(kind), response, asked.sampling)
        assert response.output_logprobs == pytest.approx(logprobs, abs=1e-4)


def test_greedy_ends_at_the_end_token_as_generate_does():
    for kind in ["qwen3", "gemma3_text"]:
        with case(kind):
            prompt = tokens_of(9)
            model = make_model(kind)
            end = generated(reference(kind), prompt, 12, eos_token_id=None)[7]
            model.generation_config.eos_token_id = end
            with running(model) as engine:
                [response] = engine.generate([request(prompt, temperature=0.0, ignore_end=False)])
            assert list(response.output_tokens) == generated(reference(kind), prompt, 12, eos_token_id=end)
            assert (response.stop_reason, response.output_tokens[-1]) == ("stop", end)


SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"temperature": 0.7, "top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(deterministic):
    """All settings in one batch: what one row needs must not affect the others."""
    requests = [
        request(tokens_of(length), key, name, max_new_tokens=8, **sampling)
        for name, sampling in SETTINGS.items()
        for key, length in enumerate((3, 17, 18))
    ]
    with running(deterministic=deterministic) as engine:
        responses = engine.generate(requests)
        alone = [engine.generate(requests[start : start + 3]) for start in range(0, len(requests), 3)]
    for asked, response in zip(requests, responses, strict=True):
        with case(asked.request_id):
            expected = full_pass(reference(), response, asked.sampling)
            assert response.output_logprobs == pytest.approx(expected, abs=1e-4)
    assert_same([each for group in alone for each in group], responses)


def test_a_least_number_of_tokens_is_part_of_the_distribution():
    """Stop tokens are excluded at first, so the other tokens share their probability."""
    stops = tuple(range(6, 18))
    asked = [request(tokens_of(8), key, min_new_tokens=6, stop_token_ids=stops, max_new_tokens=10) for key in range(8)]
    with running() as engine:
        responses = engine.generate(asked)
    for each, one in zip(responses, asked, strict=True):
        logits = logits_after(reference(), (*each.input_tokens, *each.output_tokens[:-1]))[len(each.input_tokens) - 1 :]
        logits[:6, list(stops)] = -torch.inf
        expected = [
            float(distribution(row, one.sampling)[token]) for row, token in zip(logits, each.output_tokens, strict=True)
        ]
        assert each.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_the_fused_decoder_agrees_with_transformers_own_layers(monkeypatch):
    def unfused(model, spec, cache, rows, *, deterministic, stream):
        return Runner(model, spec, cache, rows, CpuOps(), fused=False)

    requests = [request(tokens_of(length), key) for key, length in enumerate(LENGTHS)]
    kinds = [kind for kind in KINDS if reference(kind).config.model_type in FUSED and not kind.startswith("tiny:")]
    for kind in kinds:
        with case(kind), monkeypatch.context() as patch:
            with running(make_model(kind)) as engine:
                assert engine._runner._fused is not None
                fused = engine.generate(requests)
            patch.setattr("headwater.engine.engine.make_runner", unfused)
            with running(make_model(kind)) as engine:
                assert engine._runner._fused is None
                assert_same(engine.generate(requests), fused)


def test_deterministic_mode_computes_the_same_model():
    for kind in ("llama", "llama3", "qwen2_window", "qwen3", "mistral", "gemma", "gemma3_text"):
        with case(kind):
            requests = [request(tokens_of(length), temperature=0.0, max_new_tokens=8) for length in (2, 17, 40)]
            with running(make_model(kind), deterministic=True) as engine:
                for asked, response in zip(requests, engine.generate(requests), strict=True):
                    assert list(response.output_tokens) == generated(
                        reference(kind), asked.input_tokens, 8, eos_token_id=None
                    )
                    expected = full_pass(reference(kind), response, asked.sampling)
                    assert response.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_the_size_of_a_page_changes_nothing():
    requests = [request(tokens_of(length), key) for key, length in enumerate(LENGTHS)]
    with running() as engine:
        usual = engine.generate(requests)
    for page_tokens in (1, 2, 32, 256):
        with case(page_tokens), running(page_tokens=page_tokens) as engine:
            assert_same(engine.generate(requests), usual)


def refused(config):
    with pytest.raises(ModelError) as caught:
        Engine(build(config), tokenizer(), EngineConfig())
    return str(caught.value)


def test_an_unsupported_architecture_is_refused_by_name():
    message = refused(GPT2Config(vocab_size=512, n_embd=32, n_layer=1, n_head=2, eos_token_id=1))
    assert "does not support gpt2 models" in message
    assert "qwen3" in message
    mixtral = MixtralConfig(**{**SHAPE, "num_local_experts": 2}, sliding_window=None)
    assert "does not support mixtral models" in refused(mixtral)


def test_other_rotary_embeddings_than_those_it_runs_are_refused():
    for kind in ["dynamic", "yarn", "longrope"]:
        with case(kind):
            rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
            if kind == "longrope":
                rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
            message = refused(LlamaConfig(**SHAPE, rope_parameters=rope))
            assert f"does not support {kind!r} rotary embeddings; it supports default, linear, llama3;" in message


def test_one_such_embedding_among_several_is_enough_to_refuse():
    plain, yarn = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    ropes = {"sliding_attention": plain, "full_attention": yarn}
    assert "'yarn'" in refused(Gemma3TextConfig(**SHAPE, rope_parameters=ropes))


def test_an_activation_the_fused_layers_do_not_compute_is_computed_by_transformers_own():
    def model():
        return build(LlamaConfig(**SHAPE, initializer_range=0.18, hidden_act="gelu"))

    prompt = tokens_of(12)
    with running(model()) as engine:
        [response] = engine.generate([request(prompt, temperature=0.0)])
    assert list(response.output_tokens) == generated(model(), prompt, 12, eos_token_id=None)


def test_capped_logits_are_computed_or_refused():
    def model():
        return build(Gemma3TextConfig(**SHAPE, initializer_range=0.18, final_logit_softcapping=2.0))

    try:
        engine = Engine(model(), tokenizer(), EngineConfig())
    except ModelError as error:
        assert "final_logit_softcapping" in str(error)  # noqa: PT017  either answer is right, a wrong number is not
        return
    asked = request(tokens_of(12))
    [response] = engine.generate([asked])
    engine.close()
    assert response.output_logprobs == pytest.approx(full_pass(model(), response, asked.sampling), abs=1e-4)
