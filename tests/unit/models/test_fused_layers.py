"""Which models are fused, and what that does to the module all models of an architecture share. Kernels: tests/gpu."""

from __future__ import annotations

import copy
import logging
import types

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig

from headwater.config.schema import LearnerConfig
from headwater.learner import ranks
from headwater.models import fused_layers
from headwater.models.fused_layers import use_fused_layers


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
    assert "must be a causal one" in fused_layers._fuse(types.SimpleNamespace(get_decoder=lambda: decoder))
    assert modeling.Norm is Norm
    assert modeling.apply_rotary_pos_emb(1) == 2


def test_a_learner_on_a_gpu_uses_fused_layers_if_its_settings_say_so(monkeypatch):
    fused, widened = [], []
    monkeypatch.setattr(ranks, "use_fused_layers", fused.append)
    monkeypatch.setattr(ranks, "widen_layers", lambda model, dtype, *, uses_kernels: widened.append(uses_kernels))
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
