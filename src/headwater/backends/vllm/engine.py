"""vLLM as an ``InferenceEngine``.

engine = VllmEngine.launch(context, ["cuda:1"])                     # start a server and keep it alive
engine = VllmEngine.connect("http://10.0.0.7:8000", context)        # use one that runs
engine = VllmEngine.from_context(context)                           # vLLM in this process
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from headwater.backends import BACKENDS, BackendContext
from headwater.backends.launch.child import Command
from headwater.backends.remote.engine import RemoteEngine
from headwater.backends.remote.link import Garbage, Sending, ServerInfo, ServerLink, WeightStream
from headwater.backends.remote.model import RunModel, model_folder
from headwater.backends.vllm.adapters import check_adapters
from headwater.backends.vllm.http import INSIDE, OWN_WORKER, VllmLink
from headwater.backends.vllm.weights import WorkerCalls, check_transfer, make_stream, room_problem, transfer_to
from headwater.config.traits import BackendTraits
from headwater.core.capabilities import Capabilities, UpdateMode
from headwater.core.errors import BaseMissing, ConfigError, RequestError, TransferLost
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.core.waits import named_wait
from headwater.weights.adapter_files import AdaptedFiles, written_adapters

logger = logging.getLogger(__name__)

_PROBE_LIMIT_S = 120.0
_OPTIONS = f"--worker-extension-cls {OWN_WORKER} and PYTHONPATH={INSIDE}"
"""With which a running server has the methods of ``inside/``."""
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
        gpu_settings=("memory_fraction",),  # on a CPU, vLLM takes a fixed size if none is given
        connects=True,
        is_foreign=True,
        takes_adapters=True,
        transfers=("shared_memory", "file", "collective"),
        links=("gloo",),
    )
)
class VllmEngine(RemoteEngine):
    """An ``InferenceEngine`` whose work is done by vLLM."""

    program: ClassVar[str] = "vLLM"
    declared_capabilities: ClassVar[Capabilities] = replace(
        RemoteEngine.declared_capabilities, features=("logit_bias",)
    )

    @classmethod
    def _command(
        cls, context: BackendContext, model: Path, devices: Sequence[str], *, api_key: str, shares_device: bool
    ) -> Command:
        from headwater.backends.vllm.launch import command

        return command(context, model, devices, api_key=api_key, shares_device=shares_device)

    @classmethod
    def _link_to(cls, url: str, api_key: str, model: RunModel) -> VllmLink:
        return VllmLink(url, api_key, reads_images=model.processor is not None)

    @classmethod
    async def _check_server(
        cls, link: ServerLink, info: ServerInfo, context: BackendContext, model: RunModel, url: str
    ) -> None:
        where = f"the vLLM server at {url}"
        if context.owns_weights:
            check_transfer(context.config, info, where, _OPTIONS)
            check_reload(info, model, where)
            if info.receives_weights and isinstance(link, WorkerCalls):
                await link.release_slots()  # of an earlier run, which may have been killed
            if context.config.rollout.publish == "adapter":
                await check_adapters(link, info, context, model, where)
        await check_vocabulary(link, model, where)

    def _check_run(self, context: BackendContext) -> None:
        super()._check_run(context)
        rollout = context.config.rollout
        if context.owns_weights:
            check_transfer(context.config, self._info, self._name, _OPTIONS)
            self._check_room()
        if rollout.publish == "full" or rollout.servers:  # running ones are checked at every connection
            return

        async def check() -> None:
            await check_adapters(await self._session.link(), self._info, context, self._model, self._name)

        self._do(check(), f"{self._name} tells which adapters it computes")

    def _check_room(self) -> None:
        """Raise ``ConfigError`` if shared memory has no room for the slots, or say that ``auto`` uses files instead."""
        problem = self._room_problem
        if not problem or transfer_to(self._config, self._info) != "shared_memory":
            return
        if self._config.rollout.weight_transfer != "auto":
            remedy = "give it more (docker run --shm-size), or use file"
            raise ConfigError([f"rollout.weight_transfer = shared_memory: {self._name}: {problem}; {remedy}"])
        logger.warning("%s: %s; weights travel through files (docker run --shm-size)", self._name, problem)

    @cached_property
    def _room_problem(self) -> str:
        rollout = self._config.rollout
        count = len(rollout.servers) or (rollout.launch.count if rollout.is_separate else 1)
        shapes = {name: tuple(each.shape) for name, each in self._model.skeleton.named_parameters()}
        return room_problem(shapes, self._dtype, count)

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

    def _make_stream(self) -> WeightStream | None:
        # Who does not own the weights takes them from another program, which does not know where the servers are.
        if not self._session.weights.is_owned:
            return None
        return make_stream(self._config, self._info, self._dtype, has_room=not self._room_problem)

    @property
    def capabilities(self) -> Capabilities:
        can = replace(super().capabilities, checksums=self._stream is not None)
        if self._config.rollout.publish == "full":
            return can
        return replace(can, adapters=True, peft_alpha=float(self._config.lora.alpha))

    @property
    def instance(self) -> str:
        """A text that is different for every process of vLLM."""
        return self._info.instance

    def weights_checksum(self) -> str:
        """Of what the workers have received. They store it in their own layout."""
        stream, weights = self._stream, self._session.weights
        if stream is None:
            return super().weights_checksum()
        if weights.is_needed or not stream.checksum:  # another process has taken its place: send them again
            raise TransferLost(f"{self._name} has not received complete weights from this run")
        return stream.checksum

    def _send(self, update: WeightUpdate, mode: UpdateMode) -> None:
        if self._config.rollout.publish == "full":
            super()._send(update, mode)
        else:
            self._send_adapters(update, mode)

    def _send_adapters(self, update: WeightUpdate, mode: UpdateMode) -> None:
        """Write the adapters to a folder that the server loads, and before that the weights below them if they came."""
        has_adapters, older = bool(self._session.weights.adapter_folder), self._newest
        written = written_adapters(
            update,
            self._dtype,
            alpha=self._config.lora.alpha,
            shared_folder=self._config.rollout.weight_folder,
        )
        with_weights = written.weights is not None
        if not with_weights and isinstance(older, AdaptedFiles):
            written = written.over(older)
        if written.weights is None:
            written.discard()
            raise BaseMissing("the server has not been given the weights that the adapters belong to; send all weights")
        folder, adapter_folder = str(written.weights.path.parent), str(written.path.parent)

        async def load(link: ServerLink, label: str) -> None:
            if with_weights:
                await link.reload(folder, label, keeps_cache=mode == "in_flight")
            await link.load_adapters(adapter_folder, label)

        # Requests that were sent before the server had adapters do not name them, so they cannot be kept.
        chosen: UpdateMode = "interrupt" if mode == "in_flight" and not has_adapters else mode
        self._load_files(written, update.version, chosen, load, folder=folder, adapter_folder=adapter_folder)

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
                f"start it with {_OPTIONS}"
            ]
        )


async def check_vocabulary(link: ServerLink, model: RunModel, where: str) -> None:
    """Raise if the vocabulary of a running server shows that it serves another model than the run trains."""
    if await _takes(link, model.vocab_size - 1) is False:
        raise _other_vocabulary(where, "smaller", model.vocab_size)
    if await _takes(link, model.vocab_size) is True:
        raise _other_vocabulary(where, "larger", model.vocab_size)


async def _takes(link: ServerLink, token: int) -> bool | None:
    """Whether a token belongs to the server's vocabulary; None if the server does not tell.

    The token is named in a bias, whose tokens vLLM compares with the size of the model's vocabulary. It compares the
    tokens of a prompt with the size of the tokenizer's as well, so that one token too many may pass and end the server.
    """
    sampling = SamplingParams(max_new_tokens=1, logit_bias=((token, 1.0),))
    probe = ModelRequest("headwater-probe", (0,), sampling, rng_key=0)

    async def answer() -> bool | None:
        try:
            async with aclosing(link.stream(Sending(probe))) as chunks:
                async for _ in chunks:
                    pass
        except RequestError as error:
            if "vocabulary" in str(error).lower():
                return False
            if "speculative" in str(error).lower():  # with speculative decoding, vLLM takes no bias at all
                return None
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
