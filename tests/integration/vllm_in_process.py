"""Run by the Python of a vLLM environment: vLLM in the process of the engine (``test_vllm_server.py``)."""

from __future__ import annotations

import asyncio
import sys
import tempfile

try:
    import torch
    from transformers import AutoModelForCausalLM

    from headwater.backends import BackendContext
    from headwater.backends.vllm.engine import VllmEngine
    from headwater.config.load import load_config
    from headwater.core.errors import ServerLost
    from headwater.core.protocols import WeightUpdate
    from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingParams
    from headwater.models.checksum import checksum
    from headwater.models.device import with_dtype
    from headwater.models.load import load_model, load_tokenizer
    from headwater.observe.spans import Spans
except ImportError as error:
    print(f"NO PACKAGE: {error}")  # noqa: T201  read by the test
    sys.exit(0)

MODEL = "tiny:qwen3"
OUTPUT_LAYER, TRANSFER = sys.argv[1:3]
SAMPLING = SamplingParams(24, ignore_end=True)


def request(number: int) -> ModelRequest:
    return ModelRequest(f"request-{number}", (5, 6, 7, 10 + number), SAMPLING, rng_key=number)


def model_of(version: int) -> torch.nn.Module:
    if OUTPUT_LAYER == "tied":
        return load_model(MODEL, dtype="float32", device="cpu", seed=version)
    config = load_model(MODEL, dtype="float32", device="cpu", seed=0).config
    config.tie_word_embeddings = False
    torch.manual_seed(version)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


async def ask(engine: VllmEngine) -> list[ModelResponse]:
    return list(await asyncio.gather(*(engine.agenerate(request(number)) for number in range(4))))


async def follow(engine: VllmEngine) -> list[Delta]:
    return [delta async for delta in engine.astream(request(9))]


def check(model: torch.nn.Module, response: ModelResponse, version: int) -> None:
    tokens = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    start = len(response.input_tokens)
    with torch.no_grad():
        own = model(tokens).logits[0, start - 1 : -1].log_softmax(-1).gather(1, tokens[0, start:, None])[:, 0]
    error = float((own - torch.tensor(response.output_logprobs)).abs().max())
    assert error < 1e-4, error
    assert set(response.output_versions) == {version}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_of(0).save_pretrained(folder)
        load_tokenizer(MODEL).save_pretrained(folder)
        run(folder)


def run(path: str) -> None:
    settings = ["rollout.backend=vllm", "data.max_prompt_tokens=64", "rollout.max_new_tokens=64", f"model.path={path}"]
    settings.append(f"rollout.weight_transfer={TRANSFER}")
    config = with_dtype(load_config("quickstart", settings).config)
    engine = VllmEngine.from_context(BackendContext(config, path, load_tokenizer(path), Spans()))
    try:
        for version in (0, 1, 2):
            model = model_of(version)
            assert ("lm_head.weight" in dict(model.named_parameters())) == (OUTPUT_LAYER == "untied")
            if version:
                engine.update_weights(WeightUpdate.of(version, model.named_parameters())).result(600)
                assert engine.weights_checksum() == checksum(model.named_parameters())
            for response in asyncio.run(ask(engine)):
                check(model, response, version)
        deltas = asyncio.run(follow(engine))
        assert sum(len(delta.tokens) for delta in deltas) == 24
        assert len(deltas) > 2
        assert engine.capabilities.memory_tags == ()
        engine.pause()
        engine.resume()
        # Its engine ends: callers get a named error, and nothing waits for ever.
        for process in engine._server._link._engine.engine_core.resources.engine_manager.processes:
            process.kill()
        try:
            asyncio.run(asyncio.wait_for(ask(engine), 300))
            raise AssertionError("a dead engine answered")
        except ServerLost as error:
            print(error)  # noqa: T201
        assert not engine.status().is_alive
    finally:
        engine.close()
    print("all is well")  # noqa: T201  read by the test


if __name__ == "__main__":
    main()
