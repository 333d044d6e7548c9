"""Devices and number types: from the names in the config to torch's objects."""

from __future__ import annotations

import torch

from headwater.core.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, key: str = "model.device") -> torch.device:
    """``auto`` is the current CUDA device if there is one, otherwise the CPU. ``key`` is the setting in messages."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"{key} = {name}: not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"{key} = {name}: not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError(f"{key} = {name}: no CUDA device is available; use cpu or auto")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ModelError(f"{key} = {name}: the last CUDA device is cuda:{last}; use cuda:0 to cuda:{last} or auto")
    return torch.device("cuda", index)


def resolve_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"model.dtype = {name}: unknown; use one of {', '.join(DTYPES)}")
    return DTYPES[name]
