"""A segment of shared memory that this process owns.

segment = Segment(128)
segment.buffer[:4] = b"1234"        # another process opens it by ``segment.name``
segment.close()
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import fcntl
import os
from multiprocessing.shared_memory import SharedMemory

from headwater.weights.file import reserve


class Segment:
    """Shared memory of this process, with space behind it. Python removes it when the process ends, however it ends.

    The process holds a lock on it, so that others can tell whether it still lives.
    """

    def __init__(self, size: int) -> None:
        self._memory = SharedMemory(create=True, size=size)
        self._descriptor: int | None = None
        try:
            self._descriptor = _posixshmem.shm_open(f"/{self._memory.name}", os.O_RDWR, mode=0o600)
            remedy = "give /dev/shm more space (docker run --shm-size), or use rollout.weight_transfer=file"
            reserve(self._descriptor, size, "shared memory", remedy)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._memory.name

    @property
    def buffer(self) -> memoryview:
        assert self._memory.buf is not None, "an open segment has its memory"
        return self._memory.buf

    def close(self) -> None:
        """Remove it. Nothing may refer to its buffer any more."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        self._memory.close()
        self._memory.unlink()
