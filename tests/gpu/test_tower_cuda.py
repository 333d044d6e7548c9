"""The engine's vision tower on a CUDA device: in the shape of real models, in half precision, without waiting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine.vision_parts import picture, processor_of, video
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from headwater.engine.media import TowerClock
from headwater.engine.media_reader import MediaReader
from headwater.engine.tower import PackedTower, make_tower

CUDA = torch.device("cuda")
TEXT = {
    "vocab_size": 600, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
}  # fmt: skip
VISION = {
    "qwen2_5_vl": {
        "depth": 3, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 128,
        "fullatt_block_indexes": [1], "window_size": 112, "tokens_per_second": 2,
    },
    "qwen3_vl": {
        "depth": 3, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 128,
        "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 2304,
    },
}  # fmt: skip
CONTENTS = [picture(1, 252, 140), picture(2), video(3), picture(4, 336, 28), picture(5, 252, 140)]


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def model_of(name, dtype=torch.float32):
    """The widths of a real tower, with random weights that are large enough to matter."""
    make = Qwen2_5_VLConfig if name == "qwen2_5_vl" else Qwen3VLConfig
    patch = processor_of(name).family.image_processor.patch_size
    config = make(text_config=TEXT, vision_config={**VISION[name], "patch_size": patch})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        for parameter in model.parameters():  # not the frequencies of rotary positions, which stay float32
            parameter.data = parameter.to(dtype)
    return model.to(CUDA).eval()


def inputs_of(name, dtype=torch.float32, contents=CONTENTS):
    reader = MediaReader(processor_of(name), uses_grid=True, max_positions=2048, dtype=dtype, as_levels=True)
    inputs = [reader.processor.inputs(each) for each in contents]
    reader.close()
    return inputs


@torch.no_grad()
def as_transformers(name, model):
    """Picture by picture, by the layers of transformers with their own attention and convolution."""
    made = []
    for content in CONTENTS:
        pixels, grid, *_ = processor_of(name).inputs(content).values()
        output = model.get_image_features(pixels.to(CUDA), grid.to(CUDA), return_dict=True)
        layers = output.deepstack_features if name == "qwen3_vl" else []
        deep = [layer if isinstance(layer, torch.Tensor) else layer[0] for layer in layers]
        made.append(torch.cat([output.pooler_output[0], *deep]).float())
    return torch.cat(made)


def of_tower(tower, inputs):
    return torch.cat([torch.cat([each.embeddings, *each.deep]).float() for each in tower.of_inputs(inputs)])


@pytest.mark.parametrize("name", VISION)
def test_float32_equals_transformers(name):
    model = model_of(name)
    expected = as_transformers(name, model)
    tower = make_tower(model, processor_of(name))
    assert isinstance(tower, PackedTower)
    torch.testing.assert_close(of_tower(tower, inputs_of(name)), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VISION)
def test_half_precision_is_as_near_to_float32_as_transformers_is(name, dtype):
    exact = as_transformers(name, model_of(name))
    model = model_of(name, dtype)
    theirs = (as_transformers(name, model) - exact).norm() / exact.norm()
    ours = (of_tower(make_tower(model, processor_of(name)), inputs_of(name, dtype)) - exact).norm() / exact.norm()
    assert ours < 1.2 * theirs + 1e-4
    assert ours < 0.1


@pytest.mark.parametrize("name", VISION)
def test_a_pass_does_not_wait_for_the_device(name):
    tower, inputs = make_tower(model_of(name, torch.bfloat16), processor_of(name)), inputs_of(name, torch.bfloat16)
    expected = of_tower(tower, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = of_tower(tower, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, expected)


def test_the_time_of_a_pass_is_known_once_the_device_has_computed_it():
    clock, matrix = TowerClock(CUDA), torch.randn(4096, 4096, device=CUDA)
    torch.cuda.synchronize()
    with clock.running():
        for _ in range(200):  # about 0.1 s, far longer than the host needs to queue it
            matrix = matrix @ matrix
    clock.collect()
    assert clock.seconds == 0, "nothing waits for the device"
    torch.cuda.synchronize()
    clock.collect()
    assert 0 < clock.seconds < 60
