"""Which models are fused, and what that does to the module all models of an architecture share. Kernels: tests/gpu."""

from __future__ import annotations

import copy
import logging
import sys
import types
from collections import Counter

import pictures
import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from headwater.config.schema import LearnerConfig
from headwater.learner import fused_layers, ranks
from headwater.learner.fused_layers import use_fused_layers


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(fused_layers, "find_spec", lambda name: object())
    monkeypatch.setattr(fused_layers, "_fuse", lambda model: pytest.fail("it was fused"))
    caplog.set_level(logging.WARNING, logger="headwater")
    return caplog


def model_of(config):
    return types.SimpleNamespace(config=config)


def test_without_liger_the_log_says_what_to_install(monkeypatch, warnings):
    monkeypatch.setattr(fused_layers, "find_spec", lambda name: None)
    assert not use_fused_layers(model_of(LlamaConfig()))
    assert "pip install 'headwater[cuda]'" in warnings.text


def test_an_architecture_that_is_not_tested_stays_as_it_is(warnings):
    assert not use_fused_layers(model_of(MixtralConfig()))
    assert "not with mixtral" in warnings.text


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(hidden_act="gelu"), Gemma3TextConfig(hidden_activation="gelu")],
    ids=["llama", "gemma3_text"],
)
def test_an_activation_that_liger_would_replace_stays_as_it_is(config, warnings):
    assert not use_fused_layers(model_of(config))
    assert "activation gelu" in warnings.text


class Norm:
    pass


class FusedNorm:
    pass


def plain_rotary(number):
    return number + 1


def fused_rotary(number):
    return number + 100


class Attention(torch.nn.Module):
    def forward(self, modeling, number):
        return modeling.apply_rotary_pos_emb(number)


@pytest.fixture
def modeling() -> types.ModuleType:
    module = types.ModuleType("modeling")
    module.Norm, module.apply_rotary_pos_emb = Norm, plain_rotary
    return module


def fuse(modeling: types.ModuleType, attention: Attention) -> None:
    """As Liger does it: classes and functions of the module are replaced."""
    before = dict(vars(modeling))
    modeling.Norm, modeling.apply_rotary_pos_emb = FusedNorm, fused_rotary
    fused_layers._keep_to_instance(modeling, before)
    attention.forward = types.MethodType(fused_layers._forward_with_fused_rotary, attention)


def test_models_made_later_get_the_classes_they_always_had(modeling):
    fuse(modeling, Attention())
    assert modeling.Norm is Norm


def test_only_fused_models_use_the_fused_rotary_function(modeling):
    first, second, other = Attention(), Attention(), Attention()
    fuse(modeling, first)
    once = modeling.apply_rotary_pos_emb
    fuse(modeling, second)
    assert modeling.apply_rotary_pos_emb is once, "wrapped twice"
    assert first(modeling, 1) == second(modeling, 1) == copy.deepcopy(first)(modeling, 1) == 101
    assert other(modeling, 1) == 2


def test_a_pass_that_fails_leaves_no_trace(modeling):
    attention = Attention()
    fuse(modeling, attention)
    with pytest.raises(TypeError):
        attention(modeling, "not a number")
    assert Attention()(modeling, 1) == 2


def test_a_refusal_leaves_the_module_as_it_was(monkeypatch, modeling):
    def refuse(model, settings):
        modeling.Norm, modeling.apply_rotary_pos_emb = FusedNorm, fused_rotary
        raise TypeError("The model must be a causal one.")

    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", refuse)
    monkeypatch.setitem(fused_layers.sys.modules, "modeling", modeling)
    decoder = type("Decoder", (), {"__module__": "modeling"})()
    assert "must be a causal one" in fused_layers._fuse(
        types.SimpleNamespace(get_decoder=lambda: decoder, config=LlamaConfig())
    )
    assert modeling.Norm is Norm
    assert modeling.apply_rotary_pos_emb(1) == 2


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """Liger in plain torch, with the number of calls of its functions."""
    counted: Counter = Counter()

    def rotary(query, key, cos, sin, position_ids=None, unsqueeze_dim=1):
        assert cos.ndim == 3, "[1, tokens, head dim]"
        counted["rotary"] += 1

        def rotated(x):
            low, high = x.chunk(2, dim=-1)
            return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]

        return rotated(query), rotated(key)

    class SiluMul:
        @staticmethod
        def apply(gate, up):
            assert gate.shape[-1] % 64 == 0
            counted["gated product of the tower"] += 1
            return F.silu(gate) * up

    class Gated(torch.nn.Module):
        def forward(self, x):
            counted["gated product"] += 1
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def apply_liger_kernel(model, settings):
        # As for Qwen2.5-VL: a function is added that this version of transformers does not have.
        counted[type(model).__name__] += 1
        modeling = sys.modules[type(model).__module__]
        modeling.added = modeling.apply_rotary_pos_emb = modeling.apply_rotary_pos_emb_vision = rotary

    liger = {
        "liger_kernel": {},
        "liger_kernel.transformers": {"LigerSwiGLUMLP": Gated, "liger_rotary_pos_emb": rotary},
        "liger_kernel.transformers.rope": {"liger_rotary_pos_emb": rotary},
        "liger_kernel.ops": {"LigerSiLUMulFunction": SiluMul},
    }
    for name, content in liger.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fused_layers, "find_spec", lambda name: object())
    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", apply_liger_kernel)
    return counted


def logits(model, name: str) -> torch.Tensor:
    tokens, media = pictures.encoded([pictures.picture(1), pictures.picture(2, 84, 56)], name=name)
    return model(**pictures.processor(name).model_inputs(tokens, media)).logits


@pytest.mark.parametrize("name", ["tiny:qwen2_5_vl", "tiny:qwen3_vl"])
def test_of_qwens_vision_models_both_parts_are_fused(name, calls, monkeypatch):
    plain, fused = pictures.model(name), pictures.model(name)
    modeling = sys.modules[type(plain.get_decoder()).__module__]
    for rotary in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"):
        monkeypatch.setattr(modeling, rotary, getattr(modeling, rotary))  # as they are now, after this test
    assert use_fused_layers(fused)
    assert not hasattr(modeling, "added")
    with torch.no_grad():
        expected = logits(plain, name)
        assert set(calls) == {type(fused).__name__}, "another model is as it was"
        torch.testing.assert_close(logits(fused, name), expected)
    num_layers, num_blocks = len(fused.get_decoder().layers), len(fused.model.visual.blocks)
    assert calls["rotary"] == num_layers + num_blocks
    assert calls["gated product"] == num_layers
    assert calls["gated product of the tower"] == (num_blocks if name == "tiny:qwen2_5_vl" else 0)


def test_filled_up_weights_have_the_gradients_of_the_others(calls):
    config = types.SimpleNamespace(hidden_size=16, intermediate_size=36, hidden_act="silu")
    plain = Qwen2_5_VLMLP(config, bias=True)
    filled = copy.deepcopy(plain)
    fused_layers.fuse_gated_layers(types.SimpleNamespace(config=config, blocks=[types.SimpleNamespace(mlp=filled)]))
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    outputs = [each(hidden) for each in (filled, plain)]
    torch.testing.assert_close(*outputs)
    for each in outputs:
        each.square().sum().backward()
    assert calls["gated product of the tower"] == 1
    for ours, expected in zip(filled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


@pytest.mark.parametrize("name", ["tiny:smolvlm", "tiny:idefics3"])
def test_of_other_vision_models_the_decoder_is_fused(name, calls, monkeypatch):
    model = pictures.model(name)
    modeling = sys.modules[type(model.get_decoder()).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)
    assert use_fused_layers(model)
    assert calls == {"LlamaModel": 1}
    with torch.no_grad():
        logits(model, name)
    assert calls["rotary"] == len(model.get_decoder().layers)


def test_a_vision_model_without_mixed_rotary_tables_stays_as_it_is(calls, monkeypatch, caplog):
    model = pictures.model("tiny:qwen2_5_vl")
    monkeypatch.delattr(sys.modules[type(model.get_decoder()).__module__], "apply_rotary_pos_emb")
    caplog.set_level(logging.WARNING, logger="headwater")
    assert not use_fused_layers(model)
    assert "need transformers 5.17 or newer" in caplog.text
    assert not calls


def test_a_learner_on_a_gpu_uses_fused_layers_if_its_settings_say_so(monkeypatch):
    fused, widened = [], []
    monkeypatch.setattr(ranks, "use_fused_layers", fused.append)
    monkeypatch.setattr(
        ranks, "widen_layers", lambda model, dtype, *, uses_kernels, defers: widened.append(uses_kernels)
    )
    module = types.SimpleNamespace(model="model", layers=[], parameters=list)
    for device, settings in (("cuda", {}), ("cuda", {"fused_layers": False}), ("cuda", {"compile": True}), ("cpu", {})):
        ranks.shard(
            module,
            types.SimpleNamespace(count=1),
            LearnerConfig(**settings),
            compute_dtype=torch.float32,
            device=torch.device(device),
            trains=True,
        )
    assert fused == ["model"], "only the first of them"
    assert widened == [True, False, False, False]
