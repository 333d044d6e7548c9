"""Requests with images and their log-probs. Run by the Python of a vLLM environment, it checks vLLM in its process."""

from __future__ import annotations

import asyncio
import io
import random
import sys
from itertools import takewhile

try:
    import torch
    from PIL import Image

    from headwater.backends import BackendContext
    from headwater.backends.remote.engine import RemoteEngine
    from headwater.backends.vllm.engine import VllmEngine
    from headwater.chat.render import render_chat
    from headwater.config.load import load_config
    from headwater.core.capabilities import UpdateMode
    from headwater.core.media import MediaContent
    from headwater.core.protocols import WeightUpdate
    from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
    from headwater.models.device import with_dtype
    from headwater.models.load import load_model, load_processor, load_tokenizer
    from headwater.observe.spans import Spans
except ImportError as error:
    print(f"NO PACKAGE: {error}")  # noqa: T201  read by the test
    sys.exit(0)

MODEL = "tiny:qwen2_5_vl"
TOLERANCE = 1e-4
LIMIT_S = 900.0


def context(*settings: str) -> BackendContext:
    base = ["rollout.backend=vllm", "data.max_prompt_tokens=128", "rollout.max_new_tokens=32", f"model.path={MODEL}"]
    config = with_dtype(load_config("quickstart", [*base, *settings]).config)
    return BackendContext(config, MODEL, load_tokenizer(MODEL), Spans())


def picture(colour: str, size: tuple[int, int] = (56, 84)) -> MediaContent:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return MediaContent.of("image", [stream.getvalue()])


def noise(width: int, height: int) -> MediaContent:
    stream = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(0).randbytes(3 * width * height)).save(stream, "PNG")
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
    """Those of transformers' own forward pass with the same weights.

    A model with random weights may sample the token that stands for an image, and transformers would ask for the image.
    So tokens are compared up to that one.
    """
    model, processor = load_model(MODEL, dtype="float32", device="cpu", seed=seed), load_processor(MODEL)
    stand_ins = (model.config.image_token_id, model.config.video_token_id)
    sampled = list(takewhile(lambda token: token not in stand_ins, response.output_tokens))
    if not sampled:
        return
    tokens = torch.tensor([[*response.input_tokens, *sampled]])
    inputs = [processor.inputs(item.content) for item in asked.media]
    kinds = torch.zeros_like(tokens)
    for item in asked.media:
        kinds[0, item.places()] = 1
    media = {name: torch.cat([each[name] for each in inputs]) for name in (inputs[0] if inputs else ())}
    logits = model(input_ids=tokens, **({**media, "mm_token_type_ids": kinds} if media else {})).logits
    logprobs = logits[0, len(response.input_tokens) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, tokens[0, len(response.input_tokens) :, None])[:, 0]
    told = torch.tensor(response.output_logprobs[: len(sampled)])
    assert float((own - told).abs().max()) < TOLERANCE


async def ask(engine: RemoteEngine, *requests: ModelRequest) -> list[ModelResponse]:
    return list(await asyncio.gather(*map(engine.agenerate, requests)))


def publish(engine: RemoteEngine, version: int, mode: UpdateMode | None) -> None:
    model = load_model(MODEL, dtype="float32", device="cpu", seed=version)
    engine.update_weights(WeightUpdate.of(version, model.named_parameters()), mode).result(LIMIT_S)


def check_updates(engine: RemoteEngine) -> None:
    """Log-probs with images are those of the weights that were published."""
    assert engine.capabilities.media
    requests = [
        request("red", picture("red")),
        request("blue", picture("blue")),  # the same tokens as the first, so its cache must not be used
        request("both", picture("red"), picture("blue", (112, 56))),
        request("noise", noise(100, 62)),  # its size is none of those that the model reads
        request("none"),
    ]
    for version, mode in enumerate((None, "in_flight", "interrupt", "drain")):
        if version:
            publish(engine, version, mode)
        for asked, response in zip(requests, asyncio.run(ask(engine, *requests)), strict=True):
            assert set(response.output_versions) == {version}
            assert_logprobs(asked, response, seed=version)


def main() -> None:
    engine = VllmEngine.from_context(context())
    try:
        check_updates(engine)
    finally:
        engine.close()
    print("all is well")  # noqa: T201  read by the test


if __name__ == "__main__":
    main()
