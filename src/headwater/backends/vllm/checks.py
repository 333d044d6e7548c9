"""What must be true of a vLLM before a run uses it."""

from __future__ import annotations

from contextlib import aclosing

from headwater.backends.vllm.link import INSIDE, OWN_WORKER, Link, VllmInfo
from headwater.backends.vllm.model import RunModel
from headwater.backends.vllm.wire import Garbage, write_request
from headwater.core.errors import ConfigError, RequestError
from headwater.core.records import ModelRequest, SamplingParams, wrong_stop
from headwater.core.waits import named_wait

_PROBE_LIMIT_S = 120.0
_PROCESSED, _RAW = "processed_logprobs", "raw_logprobs"


def check_logprobs(info: VllmInfo, sampling: SamplingParams, where: str) -> None:
    """Raise if the log-probs that vLLM reports are not those of the distribution that it samples from."""
    if (problem := logprobs_problem(info, sampling)) is not None:
        raise ConfigError([f"{where}: {problem}"])


def logprobs_problem(info: VllmInfo, sampling: SamplingParams) -> str | None:
    mode = info.logprobs_mode
    if mode == _PROCESSED or (mode == _RAW and not _changes_logits(sampling)):
        return None
    why = "reports logits instead of log-probs"
    if mode == _RAW:
        why = "reports log-probs before temperature, truncation and bias, which are those of another policy"
    return f"vLLM {why}; start it with --logprobs-mode {_PROCESSED} instead of {mode}"


def check_request(request: ModelRequest, info: VllmInfo, model: RunModel) -> None:
    """Raise ``RequestError`` for a request that this vLLM can never serve."""
    name, size = f"request {request.request_id}", model.vocab_size
    biased = (token for token, _ in request.sampling.logit_bias)
    tokens = (*request.input_tokens, *request.given_tokens, *request.sampling.stop_token_ids, *biased)
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise RequestError(f"{name}: token id {wrong} is outside the vocabulary of {size}")
    num_tokens = len(request.input_tokens) + request.sampling.max_new_tokens
    if num_tokens > info.max_model_tokens:
        raise RequestError(
            f"{name}: {num_tokens} tokens exceed the limit of the server, {info.max_model_tokens} tokens; shorten the "
            "prompt, lower max_new_tokens, or start it with a larger --max-model-len"
        )
    if (fault := wrong_stop(request.sampling.stop_strings)) is not None:
        raise RequestError(f"{name}: stop_strings{fault}")
    if (problem := logprobs_problem(info, request.sampling)) is not None:
        raise RequestError(f"{name}: {problem}")


def _changes_logits(sampling: SamplingParams) -> bool:
    cuts = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    is_random = sampling.temperature > 0
    return (is_random and (cuts or sampling.temperature != 1)) or bool(sampling.logit_bias or sampling.min_new_tokens)


def check_reload(info: VllmInfo, model: RunModel, where: str) -> None:
    """Raise if this vLLM would keep some of the old weights when it is told to load new ones."""
    is_tied = bool(model.skeleton.config.get_text_config().tie_word_embeddings)
    if info.device == "cpu" and is_tied and not info.has_own_worker:
        raise ConfigError(
            [
                f"{where}: on a CPU, vLLM does not reload an output layer that shares its weights with the embedding; "
                f"start it with --worker-extension-cls {OWN_WORKER} and PYTHONPATH={INSIDE}"
            ]
        )


async def check_model(link: Link, info: VllmInfo, model: RunModel, where: str) -> None:
    """Raise if a running server serves another model than the run trains, as far as that shows."""
    model.check_same(info, where)
    if not await _takes(link, info, model.vocab_size - 1):
        raise _other_vocabulary(where, "smaller", model.vocab_size)
    if await _takes(link, info, model.vocab_size):
        raise _other_vocabulary(where, "larger", model.vocab_size)


async def _takes(link: Link, info: VllmInfo, token: int) -> bool:
    """Whether a token belongs to the server's vocabulary."""
    probe = ModelRequest("headwater-probe", (token,), SamplingParams(max_new_tokens=1), rng_key=0)

    async def answer() -> bool:
        try:
            async with aclosing(link.stream(write_request(probe, info.dialect, (), 0))) as chunks:
                async for _ in chunks:
                    pass
        except RequestError as error:
            if "vocabulary" in str(error):
                return False
            raise
        return True

    try:
        return await named_wait(
            answer(), lambda: "the vLLM server generates one token", kind="engine_call", hard_limit_s=_PROBE_LIMIT_S
        )
    except RequestError as error:
        raise ConfigError(
            [f"the vLLM server refuses to generate tokens: {error}; newer versions need --enable-scale-out"]
        ) from error
    except Garbage as error:
        raise ConfigError([f"the vLLM server answers something unknown: {error}"]) from error


def _other_vocabulary(where: str, how: str, size: int) -> ConfigError:
    return ConfigError(
        [
            f"{where} serves another model than this run trains: its vocabulary is {how} than {size}; start the server "
            "with the model of model.path"
        ]
    )
