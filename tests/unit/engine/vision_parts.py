"""Shared by tests of engines with vision models: pictures, prompts, and the same computed by transformers."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from engine.engine_parts import distribution
from PIL import Image

from headwater.chat.render import render_chat
from headwater.config.schema import EngineConfig
from headwater.core.media import Media, MediaContent, rotary_positions
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.engine.engine import Engine
from headwater.models.load import load_model, load_processor
from headwater.models.vision import SUPPORTED_VISION, VisionProcessor, VisionTower, uses_grid_positions

NAMES = SUPPORTED_VISION


def make_model(name: str, seed: int = 0, device: str = "cpu", dtype: str = "float32") -> Any:
    """A new model whose random weights are large enough for pictures and positions to matter."""
    model = load_model(f"tiny:{name}", dtype=dtype, device=device, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start as zeros and norms as ones, which would hide mistakes.
            if parameter.dim() == 1:
                parameter += (torch.randn(parameter.shape, generator=generator) * 0.3).to(parameter)
    return model


@cache
def reference(name: str, seed: int = 0, device: str = "cpu") -> Any:
    """The same model, run by transformers. It must not be changed."""
    return make_model(name, seed, device)


@cache
def processor_of(name: str) -> VisionProcessor:
    processor = load_processor(f"tiny:{name}")
    assert processor is not None
    return processor


def weights(name: str, seed: int, version: int, device: str = "cpu") -> WeightUpdate:
    return WeightUpdate.of(version, reference(name, seed, device).named_parameters())


def picture(seed: int = 0, width: int = 56, height: int = 56) -> MediaContent:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return MediaContent.of("image", [file.getvalue()])


def video(seed: int = 0, num_frames: int = 5, frames_per_s: float = 2.0) -> MediaContent:
    frames = [picture(100 * seed + number).frames[0] for number in range(num_frames)]
    return MediaContent.of("video", frames, frames_per_s)


def prompt_of(
    name: str, contents: Sequence[MediaContent], text: str = "What is this?"
) -> tuple[tuple[int, ...], Media]:
    parts = [part for each in contents for part in ({"type": each.kind}, {"type": "text", "text": " and "})]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return processor_of(name).encode(render_chat(processor_of(name).template, messages), contents)


def asking(
    name: str, contents: Sequence[MediaContent], key: int = 0, text: str = "What is this?", **sampling: Any
) -> ModelRequest:
    tokens, media = prompt_of(name, contents, text)
    params = SamplingParams(**{"max_new_tokens": 8, "ignore_end": True, **sampling})
    return ModelRequest(f"{len(contents)} pictures/{key}", tokens, params, key, media=media)


@contextmanager
def running(name: str, model: Any = None, **settings: Any) -> Iterator[Engine]:
    model = model if model is not None else make_model(name)
    settings.setdefault("kv_cache_gib", 0.02)
    processor = processor_of(name)
    engine = Engine(model, processor.tokenizer, EngineConfig(**settings), processor=processor)
    try:
        yield engine
    finally:
        engine.close()


def model_inputs(name: str, tokens: Sequence[int], media: Media, device: str = "cpu") -> dict[str, Any]:
    """What a processor of transformers gives to the model, and rotary positions where transformers makes wrong ones."""
    if not media:
        return {"input_ids": torch.tensor([list(tokens)], device=device)}
    made = {key: value.to(device) for key, value in processor_of(name).model_inputs(tokens, media).items()}
    if name != "qwen2_5_vl" or all(item.content.kind == "image" for item in media):
        made.pop("position_ids", None)
    return made


@torch.no_grad()
def logits_after(name: str, tokens: Sequence[int], media: Media, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """The logits after each of ``tokens``, ``[tokens, vocabulary]``, in one pass of transformers."""
    model = reference(name, seed, device)
    if media and has_stray_placeholder(name, tokens, media):
        return _assembled_logits(name, model, tokens, media).float().cpu()
    return model(**model_inputs(name, tokens, media, device), use_cache=False).logits[0].float().cpu()


def has_stray_placeholder(name: str, tokens: Sequence[int], media: Media) -> bool:
    """Whether a placeholder token is text. Models sample it like others, but transformers would look for a picture."""
    config = reference(name).config
    marks = {config.image_token_id, getattr(config, "video_token_id", None)}
    places = {place for item in media for place in item.places().tolist()}
    return any(token in marks and place not in places for place, token in enumerate(tokens))


def _assembled_logits(name: str, model: Any, tokens: Sequence[int], media: Media) -> torch.Tensor:
    """A pass of the model's decoder over embeddings, which does not look for placeholder tokens."""
    embeddings = model.get_input_embeddings()(torch.tensor(tokens, device=model.device))
    features = VisionTower(model, processor_of(name))([item.content for item in media])
    places = torch.from_numpy(np.concatenate([item.places() for item in media])).to(model.device)
    embeddings[places] = torch.cat([each.embeddings for each in features])
    options: dict[str, Any] = {}
    if uses_grid_positions(model.config):
        options["position_ids"] = torch.from_numpy(rotary_positions(len(tokens), media))[:, None].to(model.device)
    if features[0].deep:
        stands_for_media = torch.zeros(1, len(tokens), dtype=torch.bool, device=model.device)
        stands_for_media[:, places] = True
        options["visual_pos_masks"] = stands_for_media
        options["deepstack_visual_embeds"] = [
            torch.cat(layer) for layer in zip(*(each.deep for each in features), strict=True)
        ]
    return model.lm_head(model.get_decoder()(inputs_embeds=embeddings[None], **options).last_hidden_state)[0]


def full_pass(
    name: str, asked: ModelRequest, response: ModelResponse, seed: int = 0, device: str = "cpu"
) -> list[float]:
    """The log-probs of a response according to transformers."""
    tokens = (*asked.input_tokens, *asked.given_tokens, *response.output_tokens)
    first = len(tokens) - len(response.output_tokens)
    logits = logits_after(name, tokens[:-1], asked.media, seed, device)[first - 1 :]
    return [
        float(distribution(row, asked.sampling)[token])
        for row, token in zip(logits, response.output_tokens, strict=True)
    ]


@torch.no_grad()
def generated(name: str, asked: ModelRequest, device: str = "cpu") -> list[int]:
    """What ``generate`` of transformers answers."""
    model = reference(name, 0, device)
    inputs = model_inputs(name, asked.input_tokens, asked.media, device)
    mask = torch.ones_like(inputs["input_ids"])
    made = model.generate(
        **inputs,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=asked.sampling.max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made[0, len(asked.input_tokens) :].tolist()
