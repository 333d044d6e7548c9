"""The command of a vLLM server that a run starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.backends import BackendContext
from headwater.backends.launch.child import HOST, Command
from headwater.backends.remote.link import STREAM_INTERVAL
from headwater.backends.remote.servers import child_command, must_release_memory
from headwater.backends.vllm.adapters import room_for
from headwater.backends.vllm.http import INSIDE
from headwater.config.schema import Config

MEDIA_LIMITS = {"video": 0}
"""Videos are refused (docs/servers.md tells why), so vLLM need not keep room for the longest one."""
_CPU_CACHE_GIB = 1.0
_SHARED_FRACTION = 0.4
"""Share of a GPU's memory for a server on the device of the learner."""


def command(
    context: BackendContext, model: Path, devices: Sequence[str], *, api_key: str = "", shares_device: bool = False
) -> Command:
    """How a server of the run's model starts on ``devices``."""
    is_on_cpu = devices[0] == "cpu"
    settings = engine_settings(context.config, is_on_cpu=is_on_cpu, shares_device=shares_device)
    settings |= {"model": model, "tensor_parallel_size": len(devices), "uvicorn_log_level": "warning"}
    if reads_images(model):
        settings["limit_mm_per_prompt"] = json.dumps(MEDIA_LIMITS)
    if is_on_cpu:
        settings["enforce_eager"] = None
    if must_release_memory(context, devices, shares_device=shares_device):
        settings["enable_sleep_mode"] = None
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weight updates and what it tells about itself
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": HOST,  # where its processes find each other
    }
    if context.config.rollout.publish == "adapter":
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return child_command(context, "vllm", settings, devices, api_key=api_key, environment=environment, path=str(INSIDE))


def reads_images(model: Path) -> bool:
    """Whether the model in a folder has a vision tower."""
    config = model / "config.json"
    return config.is_file() and "vision_config" in json.loads(config.read_text(encoding="utf-8"))


def engine_settings(config: Config, *, is_on_cpu: bool, shares_device: bool) -> dict[str, Any]:
    """The settings of the run by the names of vLLM's engine arguments."""
    engine = config.engine
    settings: dict[str, Any] = {
        "served_model_name": "policy",
        "dtype": config.model.dtype,
        "max_model_len": config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        "seed": config.run.seed,
        # Log-probs under the distribution that was sampled from: temperature and truncation applied.
        "logprobs_mode": "processed_logprobs",
        "stream_interval": STREAM_INTERVAL,
        "enable_prefix_caching": engine.prefix_cache,
        "max_num_seqs": engine.max_sequences,
        "max_num_batched_tokens": engine.max_prefill_tokens,
        "block_size": engine.page_tokens,
        "kv_cache_memory_bytes": int((engine.kv_cache_gib or (_CPU_CACHE_GIB if is_on_cpu else 0)) * 2**30),
    }
    if config.rollout.publish == "adapter":
        settings |= {"enable_lora": True, "max_lora_rank": room_for(config.lora.rank), "max_loras": 1}
    if not is_on_cpu and not engine.kv_cache_gib:
        settings["gpu_memory_utilization"] = engine.memory_fraction or (_SHARED_FRACTION if shares_device else 0)
    return {name: value for name, value in settings.items() if value not in (0, 0.0) or isinstance(value, bool)}
