"""Vision towers with windows: all windows in one call give what one call per window gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from headwater.models.load import load_model, load_processor
from headwater.models.vision import attention
from headwater.models.vision.attention import NAME, use_window_attention


def features(model, inputs):
    """The features of the pictures, and the gradient of a weight of the first layer."""
    model.zero_grad()
    tower = model.base_model.visual
    made = torch.cat(model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output)
    (made * torch.arange(made.shape[1])).sum().backward()
    return made.detach(), tower.blocks[0].attn.qkv.weight.grad.clone()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_windows_together_equal_windows_one_by_one(name, monkeypatch):
    calls = []
    compute = attention._by_size
    monkeypatch.setattr(attention, "_by_size", lambda *given: calls.append(given[3].tolist()) or compute(*given))
    model, processor = load_model(f"tiny:{name}", dtype="float32", device="cpu", seed=0), load_processor(f"tiny:{name}")
    model.requires_grad_(True)
    generator = np.random.default_rng(0)
    sizes = [(56, 56), (84, 112), (140, 84)]
    pictures = [Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    inputs = processor.family.image_processor(pictures, return_tensors="pt")
    expected = features(model, inputs)
    assert not calls
    use_window_attention(model)
    assert model.base_model.visual.config._attn_implementation == NAME
    assert model.get_decoder().config._attn_implementation != NAME
    for ours, theirs in zip(features(model, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert len(calls) == len(model.base_model.visual.blocks)
    assert all(len(starts) > len(pictures) for starts in calls)
