"""The same rollouts by vLLM, in a separate process and environment."""

from __future__ import annotations

import json
import os
import signal
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


@dataclass(frozen=True)
class VllmRuns:
    version: str
    seconds: dict[str, list[float]]
    """Of each timed run of each case, by its name."""


def run_vllm(python: str, model: Any, cases: Sequence[VllmCase], num_runs: int) -> VllmRuns:
    """Every run has different prompts, so that none are cached."""
    device, vocabulary = model.device, model.config.vocab_size
    most = max(case.sequences for case in cases)

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
            "max_sequences": most,
            "settings": _settings(device, most),
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
        run_process([python, str(script), str(result)], json.dumps(task), {**os.environ, **_environment(device)})
        return VllmRuns(**json.loads(result.read_text()))


def run_process(command: Sequence[str], job: str, environment: dict[str, str]) -> None:
    """Run a program with ``job`` as its input, and raise with the end of its output if it fails."""
    # In a separate session: vLLM computes in child processes, which could otherwise outlive it and keep the GPU.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(job, timeout=_LIMIT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        raise RuntimeError(f"vLLM ended with code {process.returncode}:\n{output[-3000:]}")


def _settings(device: torch.device, max_sequences: int) -> dict[str, Any]:
    if device.type != "cuda":
        return {"enforce_eager": True}
    # Our models stay loaded in the same memory. 256 sequences of 9,216 tokens need 63 GiB of keys and values for a 1.5B
    # model. By default vLLM captures no graphs of more than 512 rows.
    graphs = [2**power for power in range(max_sequences.bit_length()) if 2**power < max_sequences] + [max_sequences]
    return {"gpu_memory_utilization": 0.75, "compilation_config": {"cudagraph_capture_sizes": graphs}}


def _environment(device: torch.device) -> dict[str, str]:
    shared = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    if device.type == "cuda":
        return {**shared, "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # its kernels would have to be compiled first
    return {**shared, "VLLM_CPU_KVCACHE_SPACE": "1"}
