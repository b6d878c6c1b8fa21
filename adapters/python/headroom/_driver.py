"""The CUDA driver, as far as the choice of a module and the doctor need it. Without a driver there are no GPUs."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


class DriverError(RuntimeError):
    """A call of the driver failed."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory: int  # bytes


def _open(name: str) -> Optional[ctypes.CDLL]:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _library() -> Optional[ctypes.CDLL]:
    return _open("libcuda.so.1")


def _call(library: ctypes.CDLL, function: str, *arguments: Any) -> None:
    status = getattr(library, function)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{function}: {(text.value or b'unknown error').decode()}")


def cuda_version() -> int:
    """The newest version of CUDA that the driver supports, such as 13000; 0 without a driver."""
    library = _library()
    version = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return 0
    return version.value


def gpus() -> list[Gpu]:
    """All GPUs, in the order of the driver. Raises DriverError if there is a driver that does not work."""
    library = _library()
    if library is None:
        return []
    count = ctypes.c_int()
    _call(library, "cuInit", 0)
    _call(library, "cuDeviceGetCount", ctypes.byref(count))
    return [_gpu(library, index) for index in range(count.value)]


def capabilities() -> list[tuple[int, int]]:
    """The compute capabilities of all GPUs, from the management library. In contrast to gpus() this does not start CUDA,
    which a process that forks later must not have done. Empty if the library is missing or fails."""
    library = _management_library()
    count = ctypes.c_uint()
    if library is None or library.nvmlInit_v2() != 0:
        return []
    found = []
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0 and (
                    library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0):
                found.append((major.value, minor.value))
    library.nvmlShutdown()
    return found


def _management_library() -> Optional[ctypes.CDLL]:
    return _open("libnvidia-ml.so.1")


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDeviceGetName", name, len(name), device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    capability = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int()
        _call(library, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(name.value.decode(errors="replace"), (capability[0], capability[1]), memory.value)


class Memory:
    """Memory on a GPU."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self._library, self._size = library, size
        self._address = ctypes.c_uint64()
        _call(library, "cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(size))

    @property
    def address(self) -> int:
        return self._address.value

    def write(self, data: bytes) -> None:
        assert len(data) == self._size
        _call(self._library, "cuMemcpyHtoD_v2", self._address, data, ctypes.c_size_t(len(data)))

    def read(self) -> bytes:
        data = ctypes.create_string_buffer(self._size)
        _call(self._library, "cuMemcpyDtoH_v2", data, self._address, ctypes.c_size_t(self._size))
        return data.raw

    def free(self) -> None:
        self._library.cuMemFree_v2(self._address)


@contextmanager
def memory(index: int, sizes: list[int]) -> Iterator[list[Memory]]:
    """Blocks of memory on a GPU, in the context that the CUDA runtime uses."""
    library = _library()
    if library is None:
        raise DriverError("there is no CUDA driver")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call(library, "cuInit", 0)
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    blocks: list[Memory] = []
    try:
        _call(library, "cuCtxSetCurrent", context)
        for size in sizes:
            blocks.append(Memory(library, size))
        yield blocks
    finally:
        for block in blocks:
            block.free()
        library.cuDevicePrimaryCtxRelease_v2(device)
