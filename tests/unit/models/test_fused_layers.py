"""What fusing one model does to the module that all models of its architecture share. The kernels: tests/gpu."""

from __future__ import annotations

import logging
import types

import torch

from headwater.models import fused_layers


def plain_rotary(query, key, cos, sin):
    return query + 1, key + 1


def fused_rotary(query, key, cos, sin):
    raise AssertionError("the fused function was called for a tensor on a CPU")


class Norm:
    pass


class FusedNorm:
    pass


def fuse(modeling: types.ModuleType) -> None:
    """As Liger does it: classes and functions of the module are replaced."""
    before = dict(vars(modeling))
    modeling.Norm, modeling.apply_rotary_pos_emb = FusedNorm, fused_rotary
    fused_layers._keep_to_instance(modeling, before)


def modeling() -> types.ModuleType:
    module = types.ModuleType("modeling")
    module.Norm, module.apply_rotary_pos_emb = Norm, plain_rotary
    return module


def test_without_liger_layers_stay_as_they_are_and_the_log_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setattr(fused_layers, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, logger="headwater"):
        assert fused_layers.use_fused_layers(object()) is False
    assert "pip install 'headwater[cuda]'" in caplog.text


def test_models_made_later_get_the_classes_they_always_had():
    module = modeling()
    fuse(module)
    assert module.Norm is Norm


def test_a_tensor_on_a_cpu_is_rotated_the_plain_way_however_often_models_are_fused():
    module = modeling()
    fuse(module)
    once = module.apply_rotary_pos_emb
    fuse(module)
    assert module.apply_rotary_pos_emb is once, "wrapped twice"
    query, key = torch.zeros(2), torch.ones(2)
    rotated = module.apply_rotary_pos_emb(query, key, None, None)
    assert [each.tolist() for each in rotated] == [[1.0, 1.0], [2.0, 2.0]]


def test_an_architecture_whose_rotary_function_liger_leaves_alone_keeps_it():
    module = modeling()
    before = dict(vars(module))
    module.Norm = FusedNorm
    fused_layers._keep_to_instance(module, before)
    assert module.apply_rotary_pos_emb is plain_rotary
