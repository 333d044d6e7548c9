"""The same rollouts by vLLM, in a process and an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shapes import make_prompts

_LIMIT_S = 1800


@dataclass(frozen=True)
class VllmCase:
    name: str
    sequences: int
    new_tokens: int
    samples: int
    prompt_tokens: int


def vllm_seconds(python: str, model: Any, cases: Sequence[VllmCase], num_runs: int) -> dict[str, list[float]]:
    """The seconds of each timed run of each case, by its name. Every run has prompts of its own: none are cached."""
    device, vocabulary = model.device, model.config.vocab_size

    def prompts(number: int, run: int) -> list[list[int]]:
        case, seed = cases[number], 100 * (1 + number) + run
        return [
            list(each) for each in make_prompts(case.sequences // case.samples, case.prompt_tokens, vocabulary, seed)
        ]

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        task = {
            "folder": folder,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_tokens": max(case.prompt_tokens + case.new_tokens for case in cases),
            "max_sequences": max(case.sequences for case in cases),
            "settings": _settings(device),
            "cases": [
                {
                    "name": case.name,
                    "samples": case.samples,
                    "new_tokens": case.new_tokens,
                    "warm_prompts": prompts(number, num_runs),
                    "runs": [prompts(number, run) for run in range(num_runs)],
                }
                for number, case in enumerate(cases)
            ],
        }
        result = Path(folder) / "seconds.json"
        script = Path(__file__).with_name("vllm_generate.py")
        done = subprocess.run(
            [python, str(script), str(result)], input=json.dumps(task), text=True, timeout=_LIMIT_S,
            env={**os.environ, **_environment(device)}, capture_output=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"vLLM ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        seconds: dict[str, list[float]] = json.loads(result.read_text())
        return seconds


def _settings(device: torch.device) -> dict[str, Any]:
    # Beside our models, which stay loaded.
    return {"gpu_memory_utilization": 0.5} if device.type == "cuda" else {"enforce_eager": True}


def _environment(device: torch.device) -> dict[str, str]:
    shared = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    if device.type == "cuda":
        return {**shared, "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # its kernels would have to be compiled first
    return {**shared, "VLLM_CPU_KVCACHE_SPACE": "1"}
