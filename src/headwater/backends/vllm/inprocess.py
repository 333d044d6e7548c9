"""vLLM that is installed beside Headwater, started by this process: the same calls without a server."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from headwater.backends import BackendContext
from headwater.backends.vllm.dialect import dialect_of
from headwater.backends.vllm.launch import engine_settings
from headwater.backends.vllm.link import INSIDE, OWN_WORKER, LinkLost, PauseMode, VllmInfo
from headwater.backends.vllm.session import Session
from headwater.backends.vllm.wire import Chunk, read_choice
from headwater.core.errors import ConfigError, RequestError, RolloutFailed
from headwater.core.protocols import MemoryTag
from headwater.models.device import resolve_device


class InProcessServer:
    """Brings a session its vLLM. If its engine fails, it is not started again."""

    url = ""
    num_restarts = 0

    def __init__(self, session: Session, context: BackendContext, folder: Path) -> None:
        self._session = session
        self._context = context
        self._folder = folder
        self._link: InProcessLink | None = None

    async def start(self) -> None:
        self._link = InProcessLink.start(self._context, self._folder)
        await self._session.attach(self._link, await self._link.describe())

    async def end(self) -> None:
        if self._link is not None:
            self._session.lost(self._link, "it was closed")
            await self._link.close()


class InProcessLink:
    """The calls to vLLM's ``AsyncLLM``."""

    def __init__(self, engine: Any, version: str) -> None:
        self.measured: Mapping[str, float] = {}
        self._engine = engine
        self._version = version
        self._dialect = dialect_of(version)

    @classmethod
    def start(cls, context: BackendContext, folder: Path) -> InProcessLink:
        try:
            import vllm
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ConfigError(
                [
                    f"rollout.backend = vllm: vLLM cannot be imported here ({error}); install it beside Headwater "
                    "(pip install vllm), or start it in an environment of its own with "
                    "rollout.placement=disaggregated and rollout.launch.python"
                ]
            ) from error
        is_on_cpu = resolve_device(context.config.model.device).type == "cpu"
        settings = engine_settings(context.config, is_on_cpu=is_on_cpu, shares_device=True)
        if str(INSIDE) not in sys.path:  # worker processes inherit the path, and find the methods of inside/ by it
            sys.path.append(str(INSIDE))
        sleeps = context.config.learner.offload_during_rollout
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder),
                worker_extension_cls=OWN_WORKER,
                enable_sleep_mode=sleeps,
                enforce_eager=is_on_cpu,
                **settings,
            )
        )
        return cls(engine, vllm.__version__)

    async def describe(self) -> VllmInfo:
        config = self._engine.vllm_config
        return VllmInfo(
            version=self._version,
            dialect=self._dialect,
            model=str(config.model_config.model),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            instance="here",
            max_model_tokens=config.model_config.max_model_len,
            max_sequences=config.scheduler_config.max_num_seqs,
            logprobs_mode=config.model_config.logprobs_mode,
            device=str(config.device_config.device_type),
            has_own_worker=True,
            can_sleep=config.model_config.enable_sleep_mode,
        )

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = {"prompt_token_ids": body["token_ids"], "cache_salt": body["cache_salt"]}
        params = SamplingParams(**body["sampling_params"], output_kind=RequestOutputKind.DELTA)
        try:
            async with aclosing(self._engine.generate(prompt, params, body["request_id"])) as outputs:
                async for output in outputs:
                    yield self._read(output.outputs[0])
        except EngineDeadError as error:
            raise LinkLost(f"vLLM's engine has failed: {error}") from error
        except ValueError as error:
            raise RequestError(f"vLLM refuses a request: {error}") from error

    def _read(self, output: Any) -> Chunk:
        """As if it had come over HTTP."""
        entries = [
            {"token_id": token, "token": f"token_id:{token}", "logprob": step[token].logprob}
            for token, step in zip(output.token_ids, output.logprobs or (), strict=False)
        ]
        spans = [vars(each) for each in getattr(output, "weight_versions", None) or ()]
        choice = {
            "token_ids": list(output.token_ids),
            "logprobs": {"content": entries},
            "finish_reason": output.finish_reason,
            "weight_versions": spans,
        }
        return read_choice(choice, self._dialect)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause_generation(mode=mode, clear_cache=mode != "keep")

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def reload(self, folder: str) -> None:
        try:
            await self._engine.collective_rpc("headwater_reload", kwargs={"folder": folder})
        except Exception as error:  # workers raise whatever a loader raises
            raise RolloutFailed(f"vLLM cannot load {folder}: {type(error).__name__}: {error}") from error

    async def set_label(self, label: str) -> None:
        await self._engine.update_weight_version(label)

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        await self._engine.sleep(level=1, mode="keep")
        if "weights" not in tags:
            await self._engine.wake_up(["weights"])

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self._engine.wake_up(list(tags))

    async def check_alive(self) -> None:
        await self._engine.check_health()

    async def close(self) -> None:
        self._engine.shutdown()
