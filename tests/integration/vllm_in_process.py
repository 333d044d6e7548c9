"""Run by the Python of a vLLM environment: vLLM in the process of the engine (``test_vllm_server.py``)."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the policy with adapters

try:
    import torch
    from transformers import AutoModelForCausalLM
    from unit.engine.adapters import ALPHA, RANK, Adapted

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
    from headwater.weights.publish import AdaptersAlone, publish
except ImportError as error:
    print(f"NO PACKAGE: {error}")  # noqa: T201  read by the test
    sys.exit(0)

MODEL = "tiny:qwen3"
SAMPLING = SamplingParams(24, ignore_end=True)


def request(number: int) -> ModelRequest:
    return ModelRequest(f"request-{number}", (5, 6, 7, 10 + number), SAMPLING, rng_key=number)


def model_of(version: int, output_layer: str) -> torch.nn.Module:
    if output_layer == "tied":
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


def started(path: str, *settings: str) -> VllmEngine:
    base = ["rollout.backend=vllm", "data.max_prompt_tokens=64", "rollout.max_new_tokens=64", f"model.path={path}"]
    config = with_dtype(load_config("quickstart", [*base, *settings]).config)
    return VllmEngine.from_context(BackendContext(config, path, load_tokenizer(path), Spans()))


def update_adapters() -> None:
    """Adapters alone, after the weights that they belong to."""
    engine = started(MODEL, "rollout.publish=adapter", f"lora.rank={RANK}", f"lora.alpha={ALPHA}")
    policy, alone = Adapted("float32", "cpu"), AdaptersAlone()
    try:
        for version in (1, 2, 3):
            policy.train(version)
            sent = publish(policy, engine, version, adapters=alone)
            assert (sent.num_bytes < 500_000) == (version > 1), sent.num_bytes
            model = load_model(MODEL, dtype="float32", device="cpu", seed=0)
            merged = {name: each for bucket in policy.export() for name, each in bucket}
            model.load_state_dict(merged, strict=False)
            for response in asyncio.run(ask(engine)):
                check(model, response, version)
    finally:
        engine.close()


def update_weights(output_layer: str, transfer: str) -> None:
    """All weights, of a model whose output layer is tied to the embedding or not."""
    with tempfile.TemporaryDirectory() as folder:
        model_of(0, output_layer).save_pretrained(folder)
        load_tokenizer(MODEL).save_pretrained(folder)
        follow_updates(started(folder, f"rollout.weight_transfer={transfer}"), output_layer)


def follow_updates(engine: VllmEngine, output_layer: str) -> None:
    try:
        for version in (0, 1, 2):
            model = model_of(version, output_layer)
            assert ("lm_head.weight" in dict(model.named_parameters())) == (output_layer == "untied")
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


if __name__ == "__main__":
    if sys.argv[1:] == ["adapters"]:
        update_adapters()
    else:
        update_weights(*sys.argv[1:3])
    print("all is well")  # noqa: T201  read by the test
