"""vLLM that is installed beside Headwater, started by this process: the same calls without a server."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.backends import BackendContext
from headwater.backends.remote.http import CALL_LIMIT_S
from headwater.backends.remote.link import Garbage, LinkLost, PauseMode, Sending, ServerInfo, StreamedTokens
from headwater.backends.remote.session import RemoteSession
from headwater.backends.vllm.http import INSIDE, OWN_WORKER
from headwater.backends.vllm.launch import MEDIA_LIMITS, engine_settings, reads_images
from headwater.backends.vllm.weights import WorkerCalls
from headwater.backends.vllm.wire import ADAPTERS, dialect_of, read_choice, write_request
from headwater.core.capabilities import MemoryTag
from headwater.core.errors import ConfigError, HeadwaterError, RequestError, RolloutFailed, ServerLost
from headwater.models.device import resolve_device

_ADAPTERS_ID = 1
"""vLLM's number for the adapters of the run."""


class InProcessServer:
    """Brings a session its vLLM. If its engine fails, it is not started again."""

    url = ""
    num_restarts = 0

    def __init__(self, session: RemoteSession, context: BackendContext, folder: Path) -> None:
        self._session = session
        self._context = context
        self._folder = folder
        self._link: InProcessLink | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._link = InProcessLink.start(self._context, self._folder)
        await self._session.attach(self._link, await self._link.describe())
        self._watch = asyncio.create_task(self._until_failed(self._link))

    async def _until_failed(self, link: InProcessLink) -> None:
        with suppress(LinkLost):
            await self._session.until_lost(link)
        self._session.fail(
            ServerLost(
                f"{self._session.name}: {self._session.why_lost}; vLLM in this process is not started again: resume "
                "the run, or use rollout.placement=disaggregated, which restarts it"
            )
        )

    async def end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._link is not None:
            self._session.lost(self._link, "it was closed")
            await self._link.close()


class InProcessLink(WorkerCalls):
    """The calls to vLLM's ``AsyncLLM``."""

    def __init__(self, engine: Any, version: str, *, reads_images: bool = False) -> None:
        """``reads_images`` is whether the model does."""
        self._reads_images = reads_images
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
                    "(pip install vllm), or start it in a separate environment with "
                    "rollout.placement=disaggregated and rollout.launch.python"
                ]
            ) from error
        is_on_cpu = resolve_device(context.config.model.device).type == "cpu"
        settings = engine_settings(context.config, is_on_cpu=is_on_cpu, shares_device=True)
        if str(INSIDE) not in sys.path:  # worker processes inherit the path, and find the methods of inside/ by it
            sys.path.append(str(INSIDE))
        if reads_images(folder):
            settings["limit_mm_per_prompt"] = MEDIA_LIMITS
        sleeps = context.config.learner.offload_during_rollout
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder),
                worker_extension_cls=OWN_WORKER,
                enable_sleep_mode=sleeps and not is_on_cpu,  # refused there
                enforce_eager=is_on_cpu,
                **settings,
            )
        )
        return cls(engine, vllm.__version__, reads_images=reads_images(folder))

    async def describe(self) -> ServerInfo:
        config = self._engine.vllm_config
        device = str(config.device_config.device_type)
        return ServerInfo(
            version=self._version,
            model=str(config.model_config.model),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            instance="here",
            max_model_tokens=config.model_config.max_model_len,
            max_sequences=config.scheduler_config.max_num_seqs,
            device=device,
            labels_tokens=self._dialect.labels_tokens,
            can_sleep=config.model_config.enable_sleep_mode and device != "cpu",
            logprobs_mode=str(config.model_config.logprobs_mode),
            takes_media=True,
            has_own_worker=True,
            num_workers=config.parallel_config.world_size,
            receives_weights=True,
            adapter_rank=config.lora_config.max_lora_rank if config.lora_config else 0,
            loads_adapters=True,
        )

    async def stream(self, sending: Sending) -> AsyncGenerator[StreamedTokens, None]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        body = write_request(sending, self._dialect)
        prompt = {"prompt_token_ids": body["token_ids"], "cache_salt": body["cache_salt"]}
        if media := sending.request.media:
            images = await asyncio.to_thread(lambda: list(map(_decoded, sending.prompt.images)))
            prompt["multi_modal_data"] = {"image": images}
            prompt["multi_modal_uuids"] = {"image": [item.content.digest for item in media]}
        params = SamplingParams(**body["sampling_params"], output_kind=RequestOutputKind.DELTA)
        lora = None
        if sending.has_adapters:
            from vllm.lora.request import LoRARequest

            # They are loaded already. The path is not read, and would be an error if they were lost.
            lora = LoRARequest(lora_name=ADAPTERS, lora_int_id=_ADAPTERS_ID, lora_path=ADAPTERS)
        with _engine_errors("generates"):
            answers = self._engine.generate(prompt, params, body["request_id"], lora_request=lora)
            async with aclosing(answers) as outputs:
                async for output in outputs:
                    chunk = self._read(output.outputs[0])
                    yield replace(chunk, prompt=tuple(output.prompt_token_ids)) if media else chunk

    def _read(self, output: Any) -> StreamedTokens:
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
        with _engine_errors("aborts a request"):
            await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        with _engine_errors("pauses"):
            await self._engine.pause_generation(mode=mode, clear_cache=mode != "keep")

    async def resume(self) -> None:
        with _engine_errors("resumes"):
            await self._engine.resume_generation()

    @property
    def url(self) -> str:
        """Where its workers are."""
        return "http://127.0.0.1"

    async def reload(self, folder: str, label: str, *, keeps_cache: bool = False) -> None:
        await self.call_workers("headwater_reload", folder=folder)
        await self.use_loaded(label)

    async def ask_workers(
        self, method: str, arguments: Mapping[str, Any], *, call_limit_s: float = CALL_LIMIT_S
    ) -> Sequence[Any]:
        """vLLM in this process cannot be lost without an error, so its calls have no limit."""
        with _engine_errors(f"calls {method}"):
            answers: Sequence[Any] = await self._engine.collective_rpc(method, kwargs=dict(arguments))
            return answers

    async def use_loaded(self, label: str) -> None:
        if self._reads_images:
            # Its workers forget what the tower has made of images. Its scheduler must not count on that any more.
            with _engine_errors("resets its cache of images"):
                await self._engine.reset_encoder_cache()
        await self.set_label(label)

    async def adapter_problem(self, layers: Sequence[str]) -> str:
        """Why vLLM cannot compute adapters of these layers; empty if it can."""
        problem: str = (await self.call_workers("headwater_adapter_problem", layers=list(layers)))[0]["problem"]
        return problem

    async def load_adapters(self, folder: str, label: str) -> None:
        await self.call_workers("headwater_load_adapters", folder=folder, number=_ADAPTERS_ID)
        await self.set_label(label)

    async def set_label(self, label: str) -> bool:
        if self._dialect.labels_tokens:
            with _engine_errors("labels its weights"):
                await self._engine.update_weight_version(label)
        return self._dialect.labels_tokens

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        with _engine_errors("goes to sleep"):
            await self._engine.sleep(level=1, mode="keep")
            if "weights" not in tags:
                await self._engine.wake_up(["weights"])

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        with _engine_errors("wakes up"):
            await self._engine.wake_up(list(tags))

    async def check_alive(self) -> None:
        with _engine_errors("tells whether it is alive"):
            await self._engine.check_health()

    async def measure(self) -> dict[str, float]:
        return {}  # vLLM publishes its metrics only over HTTP

    async def close(self) -> None:
        self._engine.shutdown()


def _decoded(image: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(image)).convert("RGB")


@contextmanager
def _engine_errors(what: str) -> Iterator[None]:
    """Errors of vLLM by the names that they have over HTTP."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except (HeadwaterError, Garbage):
        raise
    except EngineDeadError as error:
        raise LinkLost(f"vLLM's engine has failed, while it {what}: {error}") from error
    except ValueError as error:
        raise RequestError(f"vLLM {what}: {error}") from error
    except Exception as error:  # workers raise whatever a loader raises
        raise RolloutFailed(f"vLLM {what}: {type(error).__name__}: {error}") from error
