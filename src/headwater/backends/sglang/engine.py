"""SGLang as an ``InferenceEngine``.

engine = SglangEngine.launch(context, ["cuda:1"])                   # start a server and keep it alive
engine = SglangEngine.connect("http://10.0.0.7:30000", context)     # use one that runs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from headwater.backends import BACKENDS, BackendContext, other_model
from headwater.backends.launch.child import Command
from headwater.backends.remote.engine import RemoteEngine
from headwater.backends.remote.link import ServerInfo, ServerLink, WeightStream
from headwater.backends.remote.model import RunModel
from headwater.backends.remote.servers import LaunchedServer, child_command, must_release_memory
from headwater.backends.sglang.http import SglangLink
from headwater.backends.sglang.wire import NO_FEATURES
from headwater.config.server_checks import chosen_transfer
from headwater.config.traits import BackendTraits
from headwater.core.capabilities import Capabilities, UpdateMode
from headwater.core.errors import ConfigError
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import SamplingParams
from headwater.models.device import DTYPES

_SHARED_FRACTION = 0.4
"""Share of a GPU's memory for a server on the device of the learner."""

_VISION_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""The supported vision models that SGLang implements itself, as of 0.5.23. Others would be computed
with the layers of transformers, which was not tested with images and new weights."""


@BACKENDS.register(
    BackendTraits(
        engine_settings=(
            "max_sequences",
            "max_queue",
            "max_prefill_tokens",
            "page_tokens",
            "memory_fraction",
            "prefix_cache",
            "update_mode",
        ),
        connects=True,
        is_foreign=True,
        transfers=("file", "collective"),
    )
)
class SglangEngine(RemoteEngine):
    """An ``InferenceEngine`` whose work is done by an SGLang server."""

    program: ClassVar[str] = "SGLang"

    @classmethod
    def _command(
        cls, context: BackendContext, model: Path, devices: Sequence[str], *, api_key: str, shares_device: bool
    ) -> Command:
        return command(context, model, devices, api_key=api_key, shares_device=shares_device)

    @classmethod
    def _link_to(cls, url: str, api_key: str, model: RunModel) -> SglangLink:
        return SglangLink(url, api_key)

    @classmethod
    def _check_model(cls, context: BackendContext, model: RunModel) -> None:
        kind = model.skeleton.config.model_type
        if model.processor is not None and kind not in _VISION_TYPES:
            raise ConfigError(
                [
                    f"rollout.backend = sglang: it does not implement {kind} models itself (as of 0.5.23), "
                    f"so model.path = {context.model_path} needs rollout.backend=embedded; or use a model of type "
                    f"{' or '.join(_VISION_TYPES)}"
                ]
            )

    @classmethod
    async def _check_server(
        cls, link: ServerLink, info: ServerInfo, context: BackendContext, model: RunModel, url: str
    ) -> None:
        assert isinstance(link, SglangLink), "made below"
        if not link.is_ours:
            cls._check_model(context, model)
        if info.vocab_size is not None and (problem := other_model(context, info.vocab_size)) is not None:
            raise ConfigError([f"rollout.servers: {url} serves {info.model}, {problem}"])

    @classmethod
    def from_context(cls, context: BackendContext) -> SglangEngine:
        raise ConfigError(
            [
                "rollout.backend = sglang: SGLang runs in a separate process; use rollout.placement=disaggregated to "
                "start one (rollout.launch.python names the Python that has it), or name running ones in "
                "rollout.servers"
            ]
        )

    @property
    def _info(self) -> ServerInfo:
        """With what the server leaves to its defaults."""
        info = super()._info
        dtype = info.dtype if info.dtype in DTYPES else self._config.model.dtype
        return replace(info, dtype=dtype, max_model_tokens=info.max_model_tokens or self._model.max_tokens)

    @property
    def instance(self) -> str:
        """Of the process that serves. Older versions tell only its seed, which several may share."""
        told = self._info.instance
        return "" if told.startswith("-") else told

    @property
    def capabilities(self) -> Capabilities:
        own = super().capabilities
        return replace(own, file_weights=own.file_weights and not self._renames)

    @property
    def _renames(self) -> bool:
        """The server knows the weights by other names, so a file that others have written is of no use to it."""
        return self._model.processor is not None and self._info.published_names

    @cached_property
    def _trains_vision(self) -> bool:
        return self._model.trains_vision(self._config)

    @property
    def _media_problem(self) -> str:
        is_kept = self._info.keeps_features and not isinstance(self._server, LaunchedServer)
        if not (is_kept and self._session.weights.is_owned and self._trains_vision):
            return ""
        variables = " ".join(f"{name}={value}" for name, value in NO_FEATURES.items())
        return (
            f"{self._name} may keep what older weights of the vision tower have made of an image; start it with the "
            f"environment variables {variables}, or do not train the tower (learner.freeze=[vision])"
        )

    def _check_run(self, context: BackendContext) -> None:
        super()._check_run(context)
        if context.owns_weights and context.config.engine.update_mode == "in_flight" and not self._info.labels_tokens:
            raise ConfigError(
                [
                    f"engine.update_mode = in_flight: {self._name} (SGLang {self._info.version}) does not tell exactly "
                    "which weights produced a token; start SGLang 0.5.19 or newer with --disable-overlap-schedule, or "
                    "use auto"
                ]
            )

    def _sampling_problem(self, sampling: SamplingParams) -> str | None:
        if sampling.ignore_end and sampling.stop_token_ids:
            return "SGLang does not look at stop_token_ids if the end token is ignored; use one of the two"
        if sampling.temperature == 0 or not (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0):
            return None
        return (
            "SGLang reports log-probs before truncation, which are those of another policy; use rollout.top_k=0, "
            "rollout.top_p=1 and rollout.min_p=0"
        )

    def _make_stream(self) -> WeightStream | None:
        if chosen_transfer(self._config) != "collective":
            return None
        from headwater.backends.remote.group import GroupStream

        return GroupStream(self._config.rollout.weight_link, self._dtype)

    def _send(self, update: WeightUpdate, mode: UpdateMode) -> None:
        super()._send(with_published_names(update) if self._renames else update, mode)


_PUBLISHED_NAMES = (("model.language_model.", "model."), ("model.visual.", "visual."))
"""How the names of a vision model in memory begin, and those in the published files of Qwen2.5-VL."""


def with_published_names(update: WeightUpdate) -> WeightUpdate:
    """An update of a vision model with the only names that SGLang's Qwen2.5-VL has; its Qwen3-VL has both.

    For other names of the decoder its process ends, and it ignores other names of the tower without a word.
    """
    shapes = {_published(name): shape for name, shape in update.shapes.items()}
    buckets = ([(_published(name), tensor) for name, tensor in bucket] for bucket in update.buckets)
    return replace(update, shapes=shapes, buckets=buckets, direct=None, file=None, again=None)


def _published(name: str) -> str:
    for own, published in _PUBLISHED_NAMES:
        if name.startswith(own):
            return published + name.removeprefix(own)
    return name


def command(
    context: BackendContext, model: Path, devices: Sequence[str], *, api_key: str = "", shares_device: bool = False
) -> Command:
    """How a server of the run's model starts on ``devices``."""
    config = context.config
    engine, is_on_cpu = config.engine, devices[0] == "cpu"
    settings: dict[str, Any] = {
        "model_path": model,
        "served_model_name": "policy",
        "dtype": config.model.dtype,
        "context_length": config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        "random_seed": config.run.seed,
        "tp_size": len(devices),
        "max_running_requests": engine.max_sequences,
        "chunked_prefill_size": engine.max_prefill_tokens,
        "page_size": engine.page_tokens,
        "mem_fraction_static": engine.memory_fraction or (_SHARED_FRACTION if shares_device and not is_on_cpu else 0),
        "log_level_http": "warning",
    }
    settings = {name: value for name, value in settings.items() if value not in (0, 0.0)}
    if not engine.prefix_cache:
        settings["disable_radix_cache"] = None
    if engine.update_mode == "in_flight":
        settings["disable_overlap_schedule"] = None  # otherwise, its labels of tokens are wrong by one (http.py)
    if must_release_memory(context, devices, shares_device=shares_device):
        settings["enable_memory_saver"] = None
    if is_on_cpu:
        settings["device"] = "cpu"
    # Without it, SGLang chooses its functions for GPUs even if --device is cpu.
    environment = {**NO_FEATURES, **({"SGLANG_USE_CPU_ENGINE": "1"} if is_on_cpu else {})}
    return child_command(context, "sglang", settings, devices, api_key=api_key, environment=environment)
