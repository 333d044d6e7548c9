"""``POST /v1/completions``: what a body asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, is_integer
from headwater.serving.openai.plan import Plan
from headwater.serving.openai.sampling import SamplingFields, check_model, read_shape, refuse_unsupported
from headwater.serving.prompt import ModelLimits

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


def read_completion(body: Mapping[str, Any], limits: ModelLimits, served_name: str) -> Plan:
    fields = Fields(body)
    model = check_model(fields, served_name)
    sampling = SamplingFields.read(fields, limits)
    max_tokens = fields.optional_integer("max_tokens", minimum=1)
    shape = read_shape(fields, sampling.stops, logprobs=_logprobs(fields))
    prompt = fields.raw("prompt")
    fields.neutral("echo", [False], "only sampled tokens have log-probs; put the prompt before the text yourself")
    fields.neutral("suffix", [""], "the model only continues text")
    fields.neutral("best_of", [1, sampling.num_samples], "ask for n samples and choose among them")
    refuse_unsupported(fields)
    fields.done()
    prompts = _prompts(prompt, limits)
    limits.check_count(len(prompts) * sampling.num_samples, "n")
    num_new_tokens = [
        limits.num_new_tokens(
            len(tokens),
            max_tokens,
            DEFAULT_MAX_TOKENS,
            "max_tokens",
            prompt_field="prompt" if len(prompts) == 1 else f"prompt[{place}]",
        )
        for place, tokens in enumerate(prompts)
    ]
    return Plan.build(
        "cmpl",
        model,
        [(tokens, sampling.params(num_new)) for tokens, num_new in zip(prompts, num_new_tokens, strict=True)],
        num_samples=sampling.num_samples,
        seed=sampling.seed,
        shape=shape,
    )


def _prompts(prompt: Any, limits: ModelLimits) -> list[tuple[int, ...]]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if prompt is None:
        raise ApiError("prompt: is missing; give a text, token ids, or a list of either", param="prompt")
    if isinstance(prompt, str):
        return [limits.tokens_of_text(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise wrong("prompt", prompt, "must be a text, token ids, or a list of either")
    if not prompt:
        raise ApiError("prompt: is an empty list; give at least one prompt", param="prompt")
    if is_integer(prompt[0]):
        return [limits.tokens_of_ids(prompt, "prompt")]
    limits.check_count(len(prompt), "prompt")
    return [
        (limits.tokens_of_text if isinstance(each, str) else limits.tokens_of_ids)(each, f"prompt[{place}]")
        for place, each in enumerate(prompt)
    ]


def _logprobs(fields: Fields) -> bool:
    count = fields.optional_integer("logprobs", minimum=0)
    if count is not None and count > 1:
        raise wrong("logprobs", count, "only the sampled token's log-prob is known, not its alternatives'; use 1")
    return count is not None
