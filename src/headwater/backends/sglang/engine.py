"""SGLang as an ``InferenceEngine``.

    engine = SglangEngine.connect("http://10.0.0.7:30000", context)

Requests, updates and versions are those of vLLM's engine (``vllm/session.py``); only the calls differ (``http.py``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from headwater.backends import BACKENDS, BackendContext, check_length, other_model
from headwater.backends.sglang.http import SglangLink
from headwater.backends.vllm.connect import ConnectedServer
from headwater.backends.vllm.engine import KEY_VARIABLE, Server, VllmEngine
from headwater.backends.vllm.http import HttpLink
from headwater.backends.vllm.link import VllmInfo
from headwater.backends.vllm.model import RunModel
from headwater.backends.vllm.session import Session
from headwater.config.traits import BackendTraits
from headwater.core.errors import ConfigError, RequestError
from headwater.core.protocols import Capabilities
from headwater.core.records import ModelRequest, SamplingParams
from headwater.models.device import DTYPES


@BACKENDS.register(
    BackendTraits(engine_settings=("max_queue", "update_mode"), connects=True, is_foreign=True, transfers=("file",))
)
class SglangEngine(VllmEngine):
    """An ``InferenceEngine`` whose work is done by an SGLang server."""

    program: ClassVar[str] = "SGLang"
    declared_capabilities: ClassVar[Capabilities] = Capabilities(
        seeded_sampling=False,  # only some of its attention backends give the same tokens in every batch
        checksums=False,
        streaming=False,
    )

    @classmethod
    def connect(cls, url: str, context: BackendContext) -> SglangEngine:
        """Use a running server. Unless it serves the weights of another owner, it waits for those of this run."""
        model, where = RunModel.of(context), f"the SGLang server at {url}"

        async def check(link: HttpLink, info: VllmInfo) -> None:
            assert isinstance(link, SglangLink), "made below"
            if context.owns_weights:
                await link.resume()  # an earlier run may have left it paused
            model.check_same(info, where)
            if link.vocab_size is not None and (problem := other_model(context, link.vocab_size)) is not None:
                raise ConfigError([f"rollout.servers: {url} serves {info.model}, {problem}"])

        def make(session: Session) -> Server:
            session.weights.is_needed = context.owns_weights
            rollout = context.config.rollout
            return ConnectedServer(
                session,
                url,
                api_key=os.environ.get(KEY_VARIABLE, ""),
                check=check,
                limit_s=rollout.server_timeout_s,
                is_one_of_many=context.is_one_of_many,
                make_link=SglangLink,
            )

        return cls(where, context, model, make)

    @classmethod
    def launch(cls, context: BackendContext, devices: Sequence[str]) -> SglangEngine:
        raise _only_running("rollout.placement = disaggregated")

    @classmethod
    def from_context(cls, context: BackendContext) -> SglangEngine:
        raise _only_running("rollout.backend = sglang")

    @property
    def _info(self) -> VllmInfo:
        """With what the server leaves to its defaults."""
        info = super()._info
        dtype = info.dtype if info.dtype in DTYPES else self._config.model.dtype
        return replace(info, dtype=dtype, max_model_tokens=info.max_model_tokens or self._model.max_tokens)

    def _check(self, context: BackendContext, info: VllmInfo) -> None:
        rollout = context.config.rollout
        sampling = SamplingParams(
            rollout.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p
        )
        if (problem := _logprobs_problem(sampling)) is not None:
            raise ConfigError([f"{self._name}: {problem}"])
        check_length(context, self._info.max_model_tokens)

    def check(self, request: ModelRequest) -> None:
        super().check(request)
        if (problem := _logprobs_problem(request.sampling)) is not None:
            raise RequestError(f"request {request.request_id}: {problem}")


def _logprobs_problem(sampling: SamplingParams) -> str | None:
    if sampling.temperature == 0 or not (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0):
        return None
    return (
        "SGLang reports log-probs before truncation, which are those of another policy; use rollout.top_k=0, "
        "rollout.top_p=1 and rollout.min_p=0"
    )


def _only_running(setting: str) -> ConfigError:
    return ConfigError(
        [
            f"{setting}: a run does not start SGLang itself; start it with `python -m sglang.launch_server "
            "--model-path MODEL --port 30000` and name it in rollout.servers"
        ]
    )
