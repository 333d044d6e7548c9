"""Vision models: tokens, tower and positions against a whole forward pass of transformers."""

from __future__ import annotations

import io
import pickle
import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headwater.chat.render import render_chat
from headwater.config.load import load_config
from headwater.core.media import Media, MediaContent, rotary_positions, rotary_shift
from headwater.engine.tower import num_copied_bytes
from headwater.learner.wide_layers import widen_layers
from headwater.models import precision
from headwater.models.flops import PassFlops
from headwater.models.load import load_model, load_processor, load_tokenizer, vocabulary_size
from headwater.models.memory_sizes import ModelSize, RunSizes
from headwater.models.vision import VisionProcessor, VisionTower, uses_grid_positions, vision_parameter_names
from headwater.models.vision import attention as vision_attention
from headwater.planner.hardware import shape_of

NAMES = ["qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3"]


@cache
def model_of(name: str) -> Any:
    return load_model(f"tiny:{name}", dtype="float32", device="cpu", seed=0)


@cache
def processor_of(name: str) -> VisionProcessor:
    processor = load_processor(f"tiny:{name}")
    assert processor is not None
    return processor


def picture(width: int, height: int, seed: int = 0) -> MediaContent:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return MediaContent.of("image", [file.getvalue()])


def video(num_frames: int, width: int, height: int, frames_per_s: float) -> MediaContent:
    frames = [picture(width, height, seed).frames[0] for seed in range(num_frames)]
    return MediaContent.of("video", frames, frames_per_s)


def question(name: str, num_images: int) -> str:
    parts = [{"type": "image"}, {"type": "text", "text": " and then "}] * num_images
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]
    return render_chat(processor_of(name).template, messages)


def reference_inputs(name: str, tokens: tuple[int, ...], contents: list[MediaContent]) -> dict[str, Any]:
    """What a processor of transformers gives to the model, made by its image processor in one call."""
    config, images = model_of(name).config, [each.images()[0] for each in contents]
    makes_grid = uses_grid_positions(config)
    inputs = dict(processor_of(name).family.image_processor(images if makes_grid else [images], return_tensors="pt"))
    ids = torch.tensor([tokens])
    types = {"mm_token_type_ids": (ids == config.image_token_id).int()} if makes_grid else {}
    return {"input_ids": ids, **types, **inputs}


def assembled_logits(name: str, tokens: tuple[int, ...], media: Media, model: Any = None) -> torch.Tensor:
    """A forward pass out of its parts, as the engine and the learner do it."""
    model = model or model_of(name)
    embeddings = model.get_input_embeddings()(torch.tensor(tokens))
    features = VisionTower(model, processor_of(name))([item.content for item in media])
    places = torch.from_numpy(np.concatenate([item.places() for item in media]))
    embeddings = embeddings.index_put((places,), torch.cat([each.embeddings for each in features]))
    options: dict[str, Any] = {}
    if uses_grid_positions(model.config):
        options["position_ids"] = torch.from_numpy(rotary_positions(len(tokens), media))[:, None]
    if features[0].deep:
        is_visual = torch.zeros(1, len(tokens), dtype=torch.bool).index_fill(1, places, True)
        deep = [torch.cat(layer) for layer in zip(*(each.deep for each in features), strict=True)]
        options.update(visual_pos_masks=is_visual, deepstack_visual_embeds=deep)
    return model.lm_head(model.get_decoder()(inputs_embeds=embeddings[None], **options).last_hidden_state)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_forward_pass_from_parts_equals_the_whole(name: str) -> None:
    contents = [picture(56, 56), picture(84, 30, seed=1)]
    tokens, media = processor_of(name).encode(question(name, 2), contents)
    assert [item.num_tokens for item in media] == ([4, 3] if name.startswith("qwen") else [20, 12])
    expected = model_of(name)(**reference_inputs(name, tokens, contents)).logits
    torch.testing.assert_close(assembled_logits(name, tokens, media), expected, atol=1e-5, rtol=1e-5)
    whole = model_of(name)(**processor_of(name).model_inputs(tokens, media)).logits
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    # Another picture with the same tokens gives other logits.
    _, others = processor_of(name).encode(question(name, 2), [contents[0], picture(84, 30, seed=2)])
    assert not torch.allclose(assembled_logits(name, tokens, others), expected, atol=1e-2)


@pytest.mark.parametrize("name", [name for name in NAMES if uses_grid_positions(model_of(name).config)])
def test_rotary_positions_are_those_of_transformers(name: str) -> None:
    contents = [picture(56, 56), picture(84, 30, seed=1), picture(112, 112)]
    tokens, media = processor_of(name).encode(question(name, 3), contents)
    inputs = reference_inputs(name, tokens, contents)
    del inputs["pixel_values"]
    expected, delta = model_of(name).model.get_rope_index(**inputs)
    assert rotary_positions(len(tokens), media).tolist() == expected[:, 0].tolist()
    assert rotary_shift(media) == int(delta)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_the_places_of_placeholder_tokens(name: str) -> None:
    tokens, media = processor_of(name).encode(question(name, 2), [picture(56, 56), picture(112, 56)])
    expected = np.flatnonzero(np.array(tokens) == model_of(name).config.image_token_id)
    assert np.concatenate([item.places() for item in media]).tolist() == expected.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_vision_model_reads_text_without_pictures(name: str) -> None:
    text = question(name, 0)
    tokens, media = processor_of(name).encode(text, [])
    assert media == ()
    assert tokens == tuple(load_tokenizer(f"tiny:{name}").encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", NAMES)
def test_wrong_number_of_pictures(name: str) -> None:
    with pytest.raises(ValueError, match=r"2 placeholders .* for 1 images; it must have one for each image"):
        processor_of(name).encode(question(name, 2), [picture(56, 56)])
    with pytest.raises(ValueError, match=r"0 placeholders .* for 1 images"):
        processor_of(name).encode("What?", [picture(56, 56)])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter_of_the_tower(name: str) -> None:
    model = load_model(f"tiny:{name}", dtype="float32", device="cpu", seed=0)
    names = vision_parameter_names(model)
    same = picture(56, 56)
    first, second, third = VisionTower(model, processor_of(name))([same, picture(84, 56), same])
    assert first.embeddings is third.embeddings
    tensors = [each for made in (first, second) for each in (made.embeddings, *made.deep)]
    sum(each.square().sum() for each in tensors).backward()
    assert {name for name, each in model.named_parameters() if each.grad is not None} == names


def test_the_cache_keeps_the_last_used_within_its_bytes() -> None:
    contents = [picture(56, 56, seed) for seed in range(3)]
    made = processor_of("qwen2_5_vl")
    size = sum(tensor.nbytes for tensor in made.inputs(contents[0]).values())
    processor = VisionProcessor(made.tokenizer, made.family, max_cache_bytes=2 * size)
    first, second = processor.inputs(contents[0]), processor.inputs(contents[1])
    assert processor.inputs(contents[0]) is first
    processor.inputs(contents[2])
    assert processor.inputs(contents[0]) is first
    assert processor.inputs(contents[1]) is not second


@pytest.mark.parametrize("name", NAMES)
def test_a_pickled_processor_encodes_the_same(name: str) -> None:
    copy = pickle.loads(pickle.dumps(processor_of(name)))
    content = picture(70, 56)
    assert copy.encode(question(name, 1), [content]) == processor_of(name).encode(question(name, 1), [content])
    for key, tensor in processor_of(name).inputs(content).items():
        assert torch.equal(copy.inputs(content)[key], tensor)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_costs_count_the_tower(name: str) -> None:
    model, size = model_of(name), ModelSize.read(f"tiny:{name}")
    counts = {key: each.numel() for key, each in model.named_parameters()}
    assert size == ModelSize.of(model)
    assert size.num_parameters == sum(counts.values())
    assert size.num_vision_parameters == sum(counts[key] for key in vision_parameter_names(model)) > 0
    assert {key for key, _, _ in size.linear_shapes} >= {"q_proj", "down_proj"}
    assert len(size.linear_shapes) == 4 * 7, "the layers of the decoder only"
    tower = size.tower
    assert tower is not None
    assert (tower.num_blocks, tower.width, tower.patches_per_token) == (2, 64, 4)
    assert tower.copied_bytes(4) == num_copied_bytes(model), "what the engine copies"
    pixels = processor_of(name).inputs(picture(56, 56))["pixel_values"]
    if name.startswith("qwen"):
        assert tower.numbers_per_patch == pixels.shape[-1]
    flops = PassFlops.of(model, model.get_decoder().layers, num_outputs=512)
    block = 64 * 64 * 4 + 64 * 128 * (3 if name == "qwen2_5_vl" else 2)
    assert flops.per_media_token >= 2 * 4 * 2 * block
    assert flops.per_media_token <= 2 * 4 * size.num_vision_parameters
    assert vocabulary_size(f"tiny:{name}") == len(processor_of(name).tokenizer)
    assert shape_of(f"tiny:{name}").num_parameters == pytest.approx(
        size.num_parameters - size.num_vision_parameters, rel=0.01
    )


def test_a_frozen_tower_needs_no_gradients() -> None:
    size = ModelSize.read("tiny:qwen2_5_vl")
    trained, frozen = (
        RunSizes.of(load_config(None, list(settings)).config, size, {}, num_rows=1, prefill=16)
        for settings in ((), ("learner.freeze=[vision]",))
    )
    assert trained.gradients - frozen.gradients == 4 * size.num_vision_parameters
    assert trained.optimizer - frozen.optimizer == 8 * size.num_vision_parameters
    assert trained.activations > frozen.activations
    assert trained.parameters == frozen.parameters


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_wide_layers_take_embeddings_of_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, media = processor_of(name).encode(question(name, 1), [picture(56, 84)])
    expected = assembled_logits(name, tokens, media)
    # In float32 the wide parts must not change anything.
    monkeypatch.setattr(precision, "NARROW_TYPES", (torch.float32,))
    wide = load_model(f"tiny:{name}", dtype="float32", device="cpu", seed=0)
    assert widen_layers(wide, torch.float32, uses_kernels=False)
    torch.testing.assert_close(assembled_logits(name, tokens, media, wide), expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("qwen")])
def test_attention_over_all_windows_at_once_equals_one_window_at_a_time(name: str) -> None:
    """Pictures of several windows, of which those at the borders are smaller, and a video."""
    contents = [picture(112, 112), picture(84, 140, seed=1), picture(56, 56), picture(112, 112, seed=2)]
    model = load_model(f"tiny:{name}", dtype="float32", device="cpu", seed=0)
    tower = VisionTower(model, processor_of(name))
    assert model.model.visual.config._attn_implementation == vision_attention.NAME
    fast = tower(contents)
    model.model.visual.config._attn_implementation = "sdpa"
    for one, other in zip(fast, tower(contents), strict=True):
        torch.testing.assert_close(one.embeddings, other.embeddings, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm"])
def test_frames_of_a_video_are_scaled_one_after_the_other(name, monkeypatch):
    """A video of thousands of large frames would not fit into memory in full size."""
    alive: list[weakref.ref[Any]] = []
    most = 0
    each_image = MediaContent.each_image

    def counted(content):
        nonlocal most
        for image in each_image(content):
            alive.append(weakref.ref(image))
            most = max(most, sum(ref() is not None for ref in alive))
            yield image

    monkeypatch.setattr(MediaContent, "each_image", counted)
    processor_of(name).family.inputs(video(9, 70, 60, 2.0))
    assert len(alive) == 9
    assert most <= 2
