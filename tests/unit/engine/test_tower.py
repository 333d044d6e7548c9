"""The engine's vision tower against that of transformers."""

from __future__ import annotations

import pytest
import torch
from engine.vision_parts import make_model, picture, processor_of, video

from headwater.engine.adapters import add_adapters
from headwater.engine.tower import PackedTower, make_tower, num_copied_bytes
from headwater.models.vision import VisionTower
from headwater.models.vision.tower import PatchProjection

QWEN = ["qwen2_5_vl", "qwen3_vl"]
CONTENTS = [
    picture(1), picture(2, 252, 140), video(3), video(6, num_frames=1), picture(4, 112, 84), picture(5, 28, 336)
]  # fmt: skip
"""Of several sizes: windows that are cut off at both sides, several frames, and a single row of tokens."""


def inputs_of(name, contents=CONTENTS):
    return [processor_of(name).inputs(each) for each in contents]


def as_transformers(name, model, contents=CONTENTS):
    """Picture by picture, by the layers of transformers with their own attention and convolution."""
    features = []
    with torch.no_grad():
        for each in inputs_of(name, contents):
            pixels, grid = each.values() if len(each) == 2 else list(each.values())[:2]
            output = model.get_image_features(pixels, grid, return_dict=True)
            layers = output.deepstack_features if name == "qwen3_vl" else []
            deep = [layer if isinstance(layer, torch.Tensor) else layer[0] for layer in layers]
            features.append([output.pooler_output[0], *deep])
    return features


def assert_close(features, expected):
    for made, wanted in zip(features, expected, strict=True):
        for one, other in zip((made.embeddings, *made.deep), wanted, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", QWEN)
def test_pictures_of_many_sizes_in_one_pass_equal_transformers(name):
    model = make_model(name)
    expected = as_transformers(name, model)
    tower = make_tower(model, processor_of(name))
    assert isinstance(tower, PackedTower)
    assert_close(tower.of_inputs(inputs_of(name)), expected)
    assert_close(tower.of_inputs(inputs_of(name, CONTENTS[1:2])), expected[1:2])


@pytest.mark.parametrize("name", QWEN)
def test_pixels_as_bytes_give_the_same_features(name):
    tower, family = make_tower(make_model(name), processor_of(name)), processor_of(name).family
    levels = [family.level_inputs(each) for each in CONTENTS]
    numbers = inputs_of(name)
    sizes = [sum(each.nbytes for each in one.values()) for one in (levels[0], numbers[0])]
    assert sizes[0] < 0.15 * sizes[1]
    expected = tower.of_inputs(numbers)
    for some in (levels, [*levels[:2], *numbers[2:]]):
        for made, wanted in zip(tower.of_inputs(some), expected, strict=True):
            assert torch.equal(made.embeddings, wanted.embeddings)


@pytest.mark.parametrize("name", QWEN)
def test_new_weights_are_used_once_the_tower_is_told(name):
    model, other = make_model(name), make_model(name, 1)
    tower = make_tower(model, processor_of(name))
    tower.of_inputs(inputs_of(name, CONTENTS[:1]))
    with torch.no_grad():
        for one, new in zip(model.parameters(), other.parameters(), strict=True):
            one.copy_(new)
    tower.weights_changed()
    assert_close(tower.of_inputs(inputs_of(name)), as_transformers(name, other))


def test_the_copies_that_are_announced_are_those_that_are_made():
    model = make_model("qwen2_5_vl")
    tower = make_tower(model, processor_of("qwen2_5_vl"))
    tower.of_inputs(inputs_of("qwen2_5_vl", CONTENTS[:1]))
    tensors = [each.weight for gated in tower._copies for each in (gated.gate_up, gated.down)]
    assert sum(each.nbytes for each in tensors) == num_copied_bytes(model) > 0
    assert num_copied_bytes(make_model("qwen3_vl")) == 0
    assert num_copied_bytes(make_model("smolvlm")) == 0


def test_a_tower_with_adapters_or_of_another_family_is_left_to_transformers():
    model = make_model("qwen2_5_vl")
    add_adapters(model, rank=2, alpha=4, targets=["attn.proj"])
    assert isinstance(make_tower(model, processor_of("qwen2_5_vl")), VisionTower)
    assert isinstance(make_tower(make_model("smolvlm"), processor_of("smolvlm")), VisionTower)


@pytest.mark.parametrize("name", QWEN)
def test_the_convolution_over_patches_becomes_a_product_with_the_same_gradients(name):
    model, plain = make_model(name), make_model(name)
    names = [each for each, _ in model.named_parameters()]
    tower = VisionTower(model, processor_of(name))
    layer = model.model.visual.patch_embed.proj
    assert isinstance(layer, PatchProjection)
    assert [each for each, _ in model.named_parameters()] == names
    tower(CONTENTS[:1])[0].embeddings.square().sum().backward()
    [expected] = inputs_of(name, CONTENTS[:1])
    plain.get_image_features(*expected.values(), return_dict=True).pooler_output[0].square().sum().backward()
    wanted = plain.model.visual.patch_embed.proj.weight.grad
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
