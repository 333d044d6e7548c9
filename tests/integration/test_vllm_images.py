"""A real vLLM server with a vision model: log-probs of prompts with images, after updates, and what is refused.

vLLM's Qwen2.5-VL needs torchvision, which the environment of ``make setup-vllm`` cannot have on every machine.
"""

from __future__ import annotations

import asyncio
import io
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from command import python_of
from PIL import Image

from headwater.backends import BackendContext
from headwater.backends.vllm.engine import VllmEngine
from headwater.chat.render import render_chat
from headwater.config.load import load_config
from headwater.core.errors import RequestError
from headwater.core.media import MediaContent
from headwater.core.protocols import WeightUpdate
from headwater.core.records import ModelRequest, ModelResponse, SamplingParams
from headwater.models.device import with_dtype
from headwater.models.load import load_model, load_processor, load_tokenizer
from headwater.observe.spans import Spans

PYTHON, IS_INSTALLED = python_of("vllm")
MODEL = "tiny:qwen2_5_vl"
TOLERANCE = 1e-4
LIMIT_S = 900.0


def has_torchvision() -> bool:
    return IS_INSTALLED and not subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True).returncode


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_torchvision(), reason=f"NO VLLM WITH IMAGES: {PYTHON} has no vLLM with torchvision"),
    pytest.mark.xdist_group("vllm"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    settings = [f"model.path={MODEL}", "data.max_prompt_tokens=128", "rollout.max_new_tokens=32",
                "rollout.backend=vllm",
                "rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}"]  # fmt: skip
    config = with_dtype(load_config("quickstart", settings).config)
    engine = VllmEngine.launch(BackendContext(config, MODEL, load_tokenizer(MODEL), Spans()), ["cpu"])
    yield engine
    engine.close()


def picture(colour: str, size: tuple[int, int] = (56, 84)) -> MediaContent:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return MediaContent.of("image", [stream.getvalue()])


def request(name: str, *contents: MediaContent, max_new_tokens: int = 12) -> ModelRequest:
    processor = load_processor(MODEL)
    content = [
        {"type": "text", "text": "Look: "},
        *({"type": "image"} for _ in contents),
        {"type": "text", "text": "?"},
    ]
    text = render_chat(processor.template, [{"role": "user", "content": content}])
    tokens, media = processor.encode(text, contents)
    return ModelRequest(name, tokens, SamplingParams(max_new_tokens, ignore_end=True), rng_key=3, media=media)


@torch.no_grad()
def assert_logprobs(asked: ModelRequest, response: ModelResponse, seed: int) -> None:
    """Those of transformers' own forward pass with the same weights."""
    model, processor = load_model(MODEL, dtype="float32", device="cpu", seed=seed), load_processor(MODEL)
    tokens = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    inputs = [processor.inputs(item.content) for item in asked.media]
    kinds = torch.zeros_like(tokens)
    for item in asked.media:
        kinds[0, item.places()] = 1
    media = {name: torch.cat([each[name] for each in inputs]) for name in (inputs[0] if inputs else ())}
    logits = model(input_ids=tokens, **({**media, "mm_token_type_ids": kinds} if media else {})).logits
    logprobs = logits[0, len(response.input_tokens) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, tokens[0, len(response.input_tokens) :, None])[:, 0]
    assert float((own - torch.tensor(response.output_logprobs)).abs().max()) < TOLERANCE


async def ask(engine: VllmEngine, *requests: ModelRequest) -> list[ModelResponse]:
    return list(await asyncio.gather(*map(engine.agenerate, requests)))


def test_logprobs_with_images_are_those_of_the_published_weights(engine: VllmEngine) -> None:
    assert engine.capabilities.media
    requests = [
        request("red", picture("red")),
        request("blue", picture("blue")),  # the same tokens as the first, so its cache must not be used
        request("both", picture("red"), picture("blue", (112, 56))),
        request("none"),
    ]
    for version in (0, 1):
        if version:
            model = load_model(MODEL, dtype="float32", device="cpu", seed=version)
            engine.update_weights(WeightUpdate.of(version, model.named_parameters())).result(LIMIT_S)
        for asked, response in zip(requests, asyncio.run(ask(engine, *requests)), strict=True):
            assert set(response.output_versions) == {version}
            assert_logprobs(asked, response, seed=version)


def test_a_response_with_an_image_continues_after_given_tokens(engine: VllmEngine) -> None:
    asked = request("whole", picture("green"))
    given = replace(asked, request_id="rest", given_tokens=(40, 41, 42))
    (response,) = asyncio.run(ask(engine, given))
    assert response.output_len == asked.sampling.max_new_tokens - 3
    longer = replace(response, input_tokens=(*asked.input_tokens, 40, 41, 42))
    assert_logprobs(asked, longer, seed=engine.get_version())


def test_what_vllm_would_misread_is_refused(engine: VllmEngine) -> None:
    asked = request("refused", picture("red"))
    video = MediaContent.of("video", [picture("red").frames[0]] * 2, 1.0)
    with pytest.raises(RequestError, match="has a video, and this engine takes only images"):
        engine.check(replace(asked, media=(replace(asked.media[0], content=video),)))
    # The model has sampled a placeholder token before the image: vLLM would put the image there.
    pad = asked.input_tokens[asked.media[0].blocks[0].start]
    moved = tuple(item.moved(1) for item in asked.media)
    with pytest.raises(RequestError, match="placeholder token that stands for no image"):
        asyncio.run(ask(engine, replace(asked, input_tokens=(pad, *asked.input_tokens), media=moved)))
