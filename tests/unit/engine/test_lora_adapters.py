"""An engine that computes LoRA adapters beside its weights, and takes them alone."""

from __future__ import annotations

import pytest
import torch
from adapters import ALPHA, MODEL, RANK, Adapted, compared, engine

from headwater.config.load import load_config
from headwater.config.schema import LoraConfig
from headwater.core.errors import BaseMissing, ConfigError, WeightsError
from headwater.core.protocols import WeightUpdate
from headwater.engine.adapters import add_adapters as add_engine_adapters
from headwater.engine.adapters import is_adapter
from headwater.engine.runners import plain
from headwater.learner.export import merged_weights, unmerged_parameters
from headwater.learner.lora import add_adapters
from headwater.models.load import load_model
from headwater.weights.publish import AdaptersAlone, StreamChecksums, publish


def test_log_probs_are_those_of_merged_weights_and_few_bytes_are_sent(monkeypatch):
    for settings in ({}, {"deterministic": True, "adapter_targets": ("v_proj", "down_proj"), "adapter_alpha": 12}):
        ratio, largest, _ = compared("float32", "cpu", **settings)
        assert ratio < 0.1
        assert 0 < largest < 1e-4
    monkeypatch.setattr(plain, "can_fuse", lambda config: False)  # the layers of transformers
    _, largest, _ = compared("float32", "cpu")
    assert 0 < largest < 1e-4


def test_adapters_alone_need_the_weights_they_belong_to():
    policy, fresh, without = Adapted("float32", "cpu"), engine("float32", "cpu", RANK), engine("float32", "cpu")
    try:
        alone = WeightUpdate(1, policy.unmerged_shapes(True), policy.export_unmerged(True), adapters_alone=True)
        with pytest.raises(BaseMissing, match="send all weights"):
            fresh.update_weights(alone).result(60)
        adapters = AdaptersAlone()
        publish(policy, fresh, 1, adapters=adapters)
        replacement = engine("float32", "cpu", RANK)
        try:  # as after a restart: the engine refuses adapters alone, and gets all weights
            sizes = [publish(policy, each, 2, adapters=adapters).num_bytes for each in (fresh, replacement)]
            assert sizes[1] > 10 * sizes[0]
            assert replacement.weights_checksum() == fresh.weights_checksum()
            # A repeat has all weights, for those that have lost them. The next version has the adapters alone again.
            kinds = [adapters.update(policy, 3, StreamChecksums(torch.float32), again) for again in (True, False)]
            assert [each.adapters_alone for each in kinds] == [False, True]
        finally:
            replacement.close()
        publish(policy, without, 1)
        for update in (
            WeightUpdate(2, policy.unmerged_shapes(True), policy.export_unmerged(True), adapters_alone=True),
            WeightUpdate(2, policy.unmerged_shapes(False), policy.export_unmerged(False)),
        ):
            with pytest.raises(WeightsError, match=r"adapter_rank|unknown model\."):
                without.update_weights(update).result(60)
        assert not without.capabilities.adapters
        assert fresh.capabilities.adapters
    finally:
        fresh.close()
        without.close()


def test_the_learners_adapters_have_the_engines_names_and_are_merged_alike():
    model = load_model(MODEL, dtype="float32", device="cpu", seed=1)
    add_adapters(model, LoraConfig(rank=RANK, alpha=ALPHA))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(len(name))))
    adapters = {name: each.detach() for name, each in unmerged_parameters(model, adapters_alone=True)}
    policy = Adapted("float32", "cpu")
    assert adapters.keys() == policy.adapters.keys()
    policy.adapters = adapters
    expected = {name: tensor for bucket in policy.export() for name, tensor in bucket}
    for name, weight in merged_weights(model):
        torch.testing.assert_close(weight, expected[name])
    everything = dict(unmerged_parameters(model, adapters_alone=False))
    assert everything.keys() == policy.unmerged_shapes(False).keys()


def test_in_a_vision_model_both_sides_adapt_the_same_layers():
    name = "tiny:qwen2_5_vl"
    for targets in ((), ("o_proj", "qkv"), ("gate_proj",), ("model.visual.blocks.1.mlp.gate_proj",)):
        ours, theirs = (load_model(name, dtype="float32", device="cpu", seed=1) for _ in range(2))
        add_engine_adapters(ours, rank=2, alpha=4.0, targets=targets)
        add_adapters(theirs, LoraConfig(rank=2, alpha=4.0, targets=targets))
        adapted = {each for each, _ in ours.named_parameters() if is_adapter(each)}
        assert adapted == {each for each, _ in unmerged_parameters(theirs, adapters_alone=True)}
        assert any(".visual." in each for each in adapted) == any("qkv" in each or "visual" in each for each in targets)


def test_settings_that_cannot_publish_adapters_are_refused():
    lora = ("lora.rank=8", "rollout.publish=adapter")
    for settings, message in (
        (("rollout.publish=adapter",), "trains no adapters"),
        ((*lora, "rollout.backend=hf"), "use embedded, native or vllm"),
        (("engine.adapter_rank=8",), "use rollout.publish=adapter"),
        (("rollout.weight_encoding=delta",), "encodes weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config("quickstart", settings)
    assert load_config("quickstart", lora).config.rollout.publish == "adapter"
