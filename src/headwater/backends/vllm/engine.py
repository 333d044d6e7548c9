"""vLLM as an ``InferenceEngine``.

engine = VllmEngine.launch(context, ["cuda:1"])                     # start a server and keep it alive
engine = VllmEngine.connect("http://10.0.0.7:8000", context)        # use one that runs
engine = VllmEngine.from_context(context)                           # vLLM in this process
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import ClassVar

from headwater.backends import BACKENDS, SERVER_KEY, BackendContext, check_length
from headwater.backends.remote.engine import RemoteEngine, new_key, starter
from headwater.backends.remote.link import Garbage, Sending, ServerInfo, ServerLink
from headwater.backends.remote.model import RunModel, model_folder
from headwater.backends.remote.servers import ConnectedServer, LaunchedServer
from headwater.backends.remote.session import RemoteSession
from headwater.backends.vllm.http import INSIDE, OWN_WORKER, VllmLink
from headwater.config.traits import BackendTraits
from headwater.core.capabilities import Capabilities
from headwater.core.errors import ConfigError, RequestError
from headwater.core.request import ModelRequest
from headwater.core.sampling import SamplingParams
from headwater.core.waits import named_wait

_PROBE_LIMIT_S = 120.0
_PROCESSED, _RAW = "processed_logprobs", "raw_logprobs"


@BACKENDS.register(
    BackendTraits(
        engine_settings=(
            "max_sequences",
            "max_queue",
            "max_prefill_tokens",
            "page_tokens",
            "kv_cache_gib",
            "memory_fraction",
            "prefix_cache",
            "update_mode",
            "deterministic",
        ),
        connects=True,
        is_foreign=True,
        transfers=("file",),
    )
)
class VllmEngine(RemoteEngine):
    """An ``InferenceEngine`` whose work is done by vLLM."""

    program: ClassVar[str] = "vLLM"
    declared_capabilities: ClassVar[Capabilities] = replace(
        RemoteEngine.declared_capabilities, features=("logit_bias",)
    )

    @classmethod
    def launch(cls, context: BackendContext, devices: Sequence[str]) -> VllmEngine:
        """Start a server on ``devices``, and keep it alive."""
        from headwater.backends.vllm.launch import command

        model, key = RunModel.of(context), new_key()
        check_length(context, model.max_tokens)
        with ExitStack() as stack:
            # A process that replaces the first one loads the folder again.
            folder = stack.enter_context(model_folder(context))
            start, is_shared = starter(context, devices)
            how = command(context, folder, devices, api_key=key, shares_device=is_shared)
            make_link = partial(VllmLink, api_key=key, reads_images=model.processor is not None)
            engine = cls(
                "the vLLM server", context, model, lambda session: LaunchedServer(session, how, make_link, start)
            )
            engine._resources, engine.api_key = stack.pop_all(), key
        return engine

    @classmethod
    def connect(cls, url: str, context: BackendContext) -> VllmEngine:
        """Use a running server. Unless it serves the weights of another owner, it waits for those of this run."""
        model, where = RunModel.of(context), f"the vLLM server at {url}"
        key, limit_s = os.environ.get(SERVER_KEY, ""), context.config.rollout.server_timeout_s

        async def check(link: ServerLink, info: ServerInfo) -> None:
            if context.owns_weights:
                await link.resume()  # an earlier run may have left it paused
                check_reload(info, model, where)
            await check_model(link, model, info, where)

        def make(session: RemoteSession) -> ConnectedServer:
            session.weights.is_needed = context.owns_weights
            return ConnectedServer(
                session,
                url,
                lambda: VllmLink(url, key, reads_images=model.processor is not None),
                check,
                limit_s=limit_s,
                is_one_of_many=context.is_one_of_many,
            )

        return cls(where, context, model, make)

    @classmethod
    def from_context(cls, context: BackendContext) -> VllmEngine:
        """vLLM in this process, on the learner's device."""
        from headwater.backends.vllm.inprocess import InProcessServer

        model = RunModel.of(context)
        with ExitStack() as stack:
            folder = stack.enter_context(model_folder(context))
            engine = cls("vLLM", context, model, lambda session: InProcessServer(session, context, folder))
            engine._resources = stack.pop_all()
        return engine

    def _check_run(self, context: BackendContext) -> None:
        rollout = context.config.rollout
        sampling = SamplingParams(
            rollout.max_new_tokens,
            rollout.temperature,
            rollout.top_k,
            rollout.top_p,
            rollout.min_p,
            rollout.min_new_tokens,
        )
        if (problem := self._sampling_problem(sampling)) is not None:
            raise ConfigError([f"{self._name}: {problem}"])
        check_length(context, self._info.max_model_tokens)

    def _sampling_problem(self, sampling: SamplingParams) -> str | None:
        return logprobs_problem(self._info.logprobs_mode, sampling)


def logprobs_problem(mode: str, sampling: SamplingParams) -> str | None:
    """Why the log-probs that vLLM reports are not those of the distribution that it samples from."""
    if mode == _PROCESSED or (mode == _RAW and not _changes_logits(sampling)):
        return None
    why = "reports logits instead of log-probs"
    if mode == _RAW:
        why = "reports log-probs before temperature, truncation and bias, which are those of another policy"
    return f"vLLM {why}; start it with --logprobs-mode {_PROCESSED} instead of {mode}"


def _changes_logits(sampling: SamplingParams) -> bool:
    cuts = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    is_random = sampling.temperature > 0
    return (is_random and (cuts or sampling.temperature != 1)) or bool(sampling.logit_bias or sampling.min_new_tokens)


def check_reload(info: ServerInfo, model: RunModel, where: str) -> None:
    """Raise if this vLLM would keep some of the old weights when it is told to load new ones."""
    is_tied = bool(model.skeleton.config.get_text_config().tie_word_embeddings)
    if info.device == "cpu" and is_tied and not info.has_own_worker:
        raise ConfigError(
            [
                f"{where}: on a CPU, vLLM does not reload an output layer that shares its weights with the embedding; "
                f"start it with --worker-extension-cls {OWN_WORKER} and PYTHONPATH={INSIDE}"
            ]
        )


async def check_model(link: ServerLink, model: RunModel, info: ServerInfo, where: str) -> None:
    """Raise if a running server serves another model than the run trains, as far as that shows."""
    model.check_same(info, where)
    if not await _takes(link, model.vocab_size - 1):
        raise _other_vocabulary(where, "smaller", model.vocab_size)
    if await _takes(link, model.vocab_size):
        raise _other_vocabulary(where, "larger", model.vocab_size)


async def _takes(link: ServerLink, token: int) -> bool:
    """Whether a token belongs to the server's vocabulary."""
    probe = ModelRequest("headwater-probe", (token,), SamplingParams(max_new_tokens=1), rng_key=0)

    async def answer() -> bool:
        try:
            async with aclosing(link.stream(Sending(probe))) as chunks:
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
