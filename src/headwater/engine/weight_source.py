"""Weights from elsewhere: a file, a Hugging Face folder, or memory that another process shares."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from headwater.core.errors import WeightsError

NamedTensors = list[tuple[str, Tensor]]


def read_file(path: str) -> NamedTensors:
    """All tensors of a safetensors file, or of all safetensors files of a folder."""
    location = Path(path)
    files = sorted(location.glob("*.safetensors")) if location.is_dir() else [location]
    if not files:
        raise WeightsError(f"{location}: holds no .safetensors file; save the model with save_pretrained")
    tensors: NamedTensors = []
    for file in files:
        try:
            tensors += load_file(file).items()
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{file}: cannot be read as safetensors ({error}); the old weights stay in place"
            ) from error
    return tensors


@contextmanager
def shared_tensors(name: str) -> Iterator[NamedTensors]:
    """Tensors of the shared-memory segment ``name``, which another process filled with ``write_shared``."""
    try:
        segment = shared_memory.SharedMemory(name=name)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"shared memory {name!r}: cannot be opened ({error}); it must exist until the update has ended"
        ) from error
    # Python would remove the segment when this process ends, although it belongs to the process that made it.
    resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    try:
        yield _parse(bytes(_buffer(segment)), name)
    finally:
        segment.close()


def write_shared(image: bytes) -> shared_memory.SharedMemory:
    """A segment that holds a safetensors image (``safetensors.torch.save``); the caller closes and unlinks it."""
    segment = shared_memory.SharedMemory(create=True, size=len(image))
    _buffer(segment)[: len(image)] = image
    return segment


def _buffer(segment: shared_memory.SharedMemory) -> memoryview:
    assert segment.buf is not None, "an open segment has its memory"
    return segment.buf


def _parse(image: bytes, name: str) -> NamedTensors:
    # The segment is rounded up to whole pages of memory; safetensors wants the exact length, which its header gives.
    try:
        header = int.from_bytes(image[:8], "little")
        entries = json.loads(image[8 : 8 + header])
        length = 8 + header + max(each["data_offsets"][1] for key, each in entries.items() if key != "__metadata__")
        return list(load(image[:length]).items())
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise WeightsError(
            f"shared memory {name!r}: holds no safetensors image ({error}); the old weights stay"
        ) from error


def in_thread(action: Callable[[], None]) -> Future[None]:
    """Run ``action`` beside everything else: reading a large file must not hold generation up."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # it begins now; cancelling would neither stop it nor leave it a result to set

    def run() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  the error belongs to the caller, who waits on the future
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="headwater-weights", daemon=True).start()
    return done
