"""Device memory whose addresses outlive it: released while an engine sleeps, and back at the same place.

    memory = AddressRange(num_bytes, device)     # reserves addresses and maps memory to them
    tensor = memory.tensor(shape, torch.bfloat16)
    memory.unmap()                               # the memory is free for others; the tensor must not be touched
    memory.map()                                 # the tensor is valid again, with undefined contents

A CUDA graph stores the addresses of the tensors it reads. With fixed addresses it stays valid while an engine sleeps.
The calls go to the CUDA driver, because torch's allocator always returns addresses together with their memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 30
"""Memory is created in pieces, so that a lack of it is noticed before all of it has been taken."""
_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # values of the driver's enumerations


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    code = int(getattr(driver, name)(*arguments))
    if code == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    said = (text.value or b"unknown error").decode(errors="replace")
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {name} failed ({said})")
    raise DriverError(f"{name} failed: {said} ({code})")


def _properties(device: torch.device) -> _Properties:
    return _Properties(type=_PINNED, handle_types=0, location=_Location(_ON_DEVICE, device.index or 0))


@cache
def is_supported(device: torch.device) -> bool:
    """Whether memory of this device can be mapped to fixed addresses."""
    if device.type != "cuda":
        return False
    try:
        AddressRange(1, device)
    except (OSError, AttributeError, DriverError):  # no driver library, an old one, or a device that cannot do it
        return False
    return True


_ranges: weakref.WeakSet[AddressRange] = weakref.WeakSet()


def mapped_bytes() -> int:
    """Device memory behind all ranges of this process, which torch's statistics do not contain."""
    return sum(each.num_bytes for each in list(_ranges) if each.is_mapped)


class AddressRange:
    """A range of device addresses, with or without memory behind them. It is freed with the last tensor in it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Reserve addresses and map memory to them."""
        self._device = device
        torch.cuda.current_stream(device).synchronize()  # the thread has a CUDA context after this
        self._properties = _properties(device)
        granularity = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.num_bytes = -(-max(1, num_bytes) // granularity.value) * granularity.value
        """Rounded up to whole pages."""
        start = ctypes.c_uint64()
        size = ctypes.c_size_t(self.num_bytes)
        _call(
            "cuMemAddressReserve",
            ctypes.byref(start),
            size,
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_ulonglong(0),
        )
        self._start = start.value
        self._mapped: list[tuple[int, int]] = []
        """The start and the size of every piece of memory."""
        weakref.finalize(self, _free, self._start, self.num_bytes, self._mapped, device).atexit = False
        self.map()
        _ranges.add(self)

    @property
    def is_mapped(self) -> bool:
        return bool(self._mapped)

    def map(self) -> None:
        """Put memory behind the addresses. Raises ``torch.OutOfMemoryError``, and then nothing is mapped."""
        if self._mapped:
            return
        if torch.cuda.mem_get_info(self._device)[0] < self.num_bytes:
            torch.cuda.empty_cache()  # what torch has reserved and does not use
        try:
            for offset in range(0, self.num_bytes, _CHUNK_BYTES):
                self._map_piece(self._start + offset, min(_CHUNK_BYTES, self.num_bytes - offset))
        except BaseException:
            self.unmap()
            raise
        access = _Access(_Location(_ON_DEVICE, self._device.index or 0), _READ_WRITE)
        start, size = ctypes.c_uint64(self._start), ctypes.c_size_t(self.num_bytes)
        _call("cuMemSetAccess", start, size, ctypes.byref(access), ctypes.c_size_t(1))

    def _map_piece(self, start: int, size: int) -> None:
        handle = ctypes.c_ulonglong()
        _call(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(size),
            ctypes.byref(self._properties),
            ctypes.c_ulonglong(0),
        )
        try:
            zero = ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)
            _call("cuMemMap", ctypes.c_uint64(start), ctypes.c_size_t(size), *zero)
            self._mapped.append((start, size))
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps the memory

    def unmap(self) -> None:
        """Give the memory back. All queued work on the device is waited for, because it may use the memory."""
        _unmap(self._mapped, self._device)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A tensor at ``offset`` bytes. It keeps the range alive. The memory must be mapped, and is not initialised."""
        count = dtype.itemsize
        for each in shape:
            count *= each
        assert self._mapped, "map before"
        assert offset + count <= self.num_bytes, "inside the range"
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        raw = torch.as_tensor(_Window(self, self._start + offset, count), device=self._device)
        return raw.view(dtype).view(tuple(shape))


class _Window:
    """Bytes of a range, in the form that torch makes a tensor of without a copy."""

    def __init__(self, owner: AddressRange, start: int, count: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (start, False),
            "version": 2,
        }


def _unmap(mapped: list[tuple[int, int]], device: torch.device) -> None:
    if not mapped:
        return
    torch.cuda.synchronize(device)
    while mapped:
        start, size = mapped[-1]
        _call("cuMemUnmap", ctypes.c_uint64(start), ctypes.c_size_t(size))
        mapped.pop()


def _free(start: int, num_bytes: int, mapped: list[tuple[int, int]], device: torch.device) -> None:
    _unmap(mapped, device)
    _call("cuMemAddressFree", ctypes.c_uint64(start), ctypes.c_size_t(num_bytes))
