"""Answers of a real vLLM or SGLang server, and what the learner's models make of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from headwater.backends.remote.engine import RemoteEngine
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.models.load import load_model

MODEL = "tiny:qwen3"
TOLERANCE = 1e-4
"""Between float32 log-probs of a server and of transformers."""
DIFFERENT = 10 * TOLERANCE
"""Log-probs of two versions differ by more: most by about 1, but the part of a version may be a single token, whose
log-probs can be close by chance."""
LIMIT_S = 900.0


def weights(seed: int) -> torch.nn.Module:
    return load_model(MODEL, dtype="float32", device="cpu", seed=seed)


def publish(engine: RemoteEngine, model: torch.nn.Module, version: int, mode=None) -> None:
    engine.update_weights(WeightUpdate.of(version, model.named_parameters()), mode).result(LIMIT_S)


def requests(count: int, sampling: SamplingParams) -> list[ModelRequest]:
    return [ModelRequest(f"request-{each}", (5, 6, 7, 10 + each), sampling, rng_key=each) for each in range(count)]


async def ask(engine: RemoteEngine, count: int, sampling: SamplingParams) -> list[ModelResponse]:
    return list(await asyncio.gather(*map(engine.agenerate, requests(count, sampling))))


def still_answers(engine: RemoteEngine) -> bool:
    """Whether responses are incomplete after everything has been read that the server, which is stopped, had sent.

    It counts turns of the event loop that reads, not seconds, because a busy machine may not let it read for a while.
    """

    async def read() -> int:
        for _ in range(50):
            await asyncio.sleep(0.005)
        return engine._session.num_open

    return engine._do(read(), "what has arrived is read") > 0


@torch.no_grad()
def logprobs(
    model: torch.nn.Module, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0, top_k: int = 0
) -> torch.Tensor:
    """What the learner computes for the response ``output``."""
    tokens = torch.tensor([[*prompt, *output]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
    if top_k:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]


@torch.no_grad()
def continued_logprobs(
    old: torch.nn.Module, new: torch.nn.Module, num_old: int, response: ModelResponse, sampling: SamplingParams
) -> torch.Tensor:
    """Log-probs if the weights change after ``num_old`` tokens, whose keys and values stay those of the old weights."""
    first = len(response.input_tokens)
    tokens = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    # The last old token was sampled, but not read yet: the new weights make its keys and values.
    num_read = first + num_old - 1
    before = old(tokens[:, :num_read], use_cache=True)
    after = new(tokens[:, num_read:], past_key_values=before.past_key_values)
    logits = torch.cat([before.logits, after.logits], dim=1)[0, first - 1 : -1] / sampling.temperature
    return logits.log_softmax(-1).gather(1, tokens[0, first:, None])[:, 0]


def assert_continued(
    old: torch.nn.Module, new: torch.nn.Module, num_old: int, response: ModelResponse, sampling: SamplingParams
) -> None:
    """The weights changed after ``num_old`` tokens, and neither one token earlier nor one later."""
    own = torch.tensor(response.output_logprobs)
    errors = {
        boundary: float((continued_logprobs(old, new, boundary, response, sampling) - own).abs().max())
        for boundary in (num_old - 1, num_old, num_old + 1)
    }
    assert errors.pop(num_old) < TOLERANCE
    assert min(errors.values()) > DIFFERENT


def assert_sampled_by(models: dict[int, torch.nn.Module], response: ModelResponse, sampling: SamplingParams) -> None:
    """Every token has the log-prob of the version that it names."""
    own = torch.tensor(response.output_logprobs)
    versions = torch.tensor(response.output_versions)
    assert set(response.output_versions) <= models.keys()
    for version, model in models.items():
        theirs = logprobs(model, response.input_tokens, response.output_tokens, sampling.temperature, sampling.top_k)
        error = (theirs - own).abs()
        if (versions == version).any():
            assert float(error[versions == version].max()) < TOLERANCE
        if (versions != version).any():
            assert float(error[versions != version].max()) > DIFFERENT
