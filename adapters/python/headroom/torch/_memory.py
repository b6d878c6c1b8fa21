"""Converts torch tensors to the tuples (pointer, type, count, device) that the core accepts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch.autograd.graph import increment_version

from headroom import _core
from headroom._errors import make

View = tuple[int, int, int, int]

# torch.compile runs functions with this decorator as they are. Unlike torch.compiler.disable it does not import the
# compiler, which takes a second, together with this package.
keep_eager = torch._disable_dynamo

_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_EMPTY = 64


@functools.cache
def _has_cuda() -> bool:
    return _core.cuda_available()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor stores its own memory. Subclasses with __torch_dispatch__ may wrap other tensors."""
    kind = type(tensor)
    return kind in _PLAIN or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def view_of(tensor: torch.Tensor) -> Optional[View]:
    """The memory of a dense tensor on the CPU or a CUDA device. None for other tensors: of another type or
    layout, wrappers of other tensors, or on CUDA if the core was built without it."""
    code = _CODES.get(tensor.dtype)
    if code is None or not _is_plain(tensor) or tensor.layout is not _STRIDED:
        return None
    if not (tensor.is_contiguous() or is_dense(tensor)) or tensor.is_neg():
        return None
    # An empty tensor has a null address, which would mean "no gradient". This address is never read.
    address = tensor.data_ptr() or _EMPTY
    if tensor.is_cpu:
        return (address, code, tensor.numel(), -1)
    if tensor.is_cuda and _has_cuda():
        return (address, code, tensor.numel(), tensor.device.index)
    return None


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether the storage contains all elements, that is, has not been shrunk or freed."""
    if tensor.is_sparse or tensor.numel() == 0:
        return True
    last = tensor.storage_offset()
    last += sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.untyped_storage().nbytes() >= (last + 1) * tensor.element_size()


def local_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The part of a DTensor that is in this process; any other tensor as it is."""
    if type(tensor) in _PLAIN or not hasattr(tensor, "_local_tensor"):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):
        raise make("unsupported", f"The gradient of {name} is a DTensor whose sum over the ranks is not made yet "
                   "(Partial); redistribute it first.")
    return tensor._local_tensor


def local_grad(param: torch.Tensor, name: str) -> torch.Tensor:
    """The part of a parameter's gradient that is in this process."""
    grad: Any = param.grad
    if hasattr(param, "_local_tensor") and hasattr(grad, "_local_tensor") and grad.placements != param.placements:
        local_of(grad, name)  # raises for Partial
        raise make("unsupported", f"The gradient of {name} is placed as {grad.placements} and the parameter as "
                   f"{param.placements}; redistribute the gradient first.")
    return local_of(grad, name)


def increment_versions(tensors: list[torch.Tensor]) -> None:
    """Increments the version counters of these tensors, so that autograd detects the write."""
    try:
        increment_version(tensors)
    except RuntimeError:  # before torch 2.6 it takes one tensor, and writes to none if there are several
        for tensor in tensors:
            increment_version(tensor)


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A local tensor as a DTensor that is placed like ``tensor``; as it is if that is an ordinary one."""
    if type(tensor) in _PLAIN or not hasattr(tensor, "_local_tensor"):
        return local
    return type(tensor.data).from_local(local, tensor.device_mesh, tensor.placements, run_check=False,
                                        shape=tensor.shape, stride=tensor.stride())


def tensor_at(address: int, device: torch.device, owner: Any) -> torch.Tensor:
    """A float in the core's memory as a tensor without dimensions; keeps ``owner`` alive."""
    index = device.index if device.type == "cuda" else -1
    return torch.from_dlpack(_core.Tensor.from_pointer(address, "float32", 1, index, False, owner)).view(())


def torch_memory(size: int, device: int) -> torch.Tensor:
    """``size`` bytes from torch's allocator, on a CUDA device or, below 0, on the CPU. The core uses them for masters and
    moments."""
    return torch.empty(size, dtype=torch.uint8, device="cpu" if device < 0 else torch.device("cuda", device))


def check_whole(name: str, param: torch.Tensor, grad: Optional[torch.Tensor]) -> None:
    """Refuses tensors that were resized in place, or whose storage was."""
    if grad is not None and grad.shape != param.shape:
        raise make("mismatch", f"{name} has shape {tuple(param.shape)} and a gradient of shape "
                   f"{tuple(grad.shape)}; they have to be equal.")
    for tensor, what in ((param, name), (grad, f"The gradient of {name}")):
        if tensor is not None and not is_whole(tensor):
            raise make("invalid argument", f"{what} has less memory than its shape needs; its "
                       "storage was freed or truncated. Run backward again, or restore it.")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """As local_of(), for parameters, which are never Partial."""
    return getattr(tensor, "_local_tensor", tensor)


def all_zero(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether this process has no gradient other than 0."""
    return not any(param.grad is not None and local(param.grad).count_nonzero() for param in parameters)


def placed_like(param: Any, value: Any) -> Any:
    """A saved value with the placements of the parameter."""
    if not hasattr(param, "_local_tensor"):
        return value.full_tensor() if hasattr(value, "_local_tensor") else value
    if hasattr(value, "_local_tensor"):
        return value.redistribute(param.device_mesh, param.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, param.device_mesh, param.placements)


class StepNumbers:
    """found_inf, divisor and norm of an optimizer's last unscale_ or step, as views of the core's memory."""

    def __init__(self) -> None:
        self._address = 0
        self._views: list[torch.Tensor] = []

    def of(self, scaler: _core.GradScaler, core: _core.Optimizer, device: torch.device) -> list[torch.Tensor]:
        address = scaler.numbers_of(core)
        if self._address != address:
            self._views = [tensor_at(address + 4 * i, device, (core, scaler)) for i in range(3)]
            self._address = address
        return self._views


class _Places:
    """``_core.Places`` in Python, for a torch without DLPack's exchange API."""

    def __init__(self) -> None:
        self._seen: tuple[list[Any], list[Any]] = ([], [])
        self._versions: list[int] = []

    @staticmethod
    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return len(a) == len(b) and not any(map(operator.is_not, a, b))

    @staticmethod
    def _place(tensor: Optional[torch.Tensor]) -> Any:
        if tensor is None:
            return None
        if type(tensor) not in _PLAIN or tensor.layout is not _STRIDED:
            return object()  # equal to nothing, so that the tensor counts as moved
        return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())

    def look(self, parameters: list[torch.Tensor], versions: bool) -> tuple[bool, bool, list[int]]:
        weights = [self._place(param) for param in parameters]
        grads = [self._place(param.grad) for param in parameters]
        weights_moved = weights != self._seen[0]
        moved = weights_moved or grads != self._seen[1]
        self._seen = (weights, grads)
        if not versions:
            return moved, weights_moved, []
        before, self._versions = self._versions, [param._version for param in parameters]
        before += [-1] * (len(parameters) - len(before))
        written = [i for i, version in enumerate(self._versions) if version != before[i]]
        return moved, weights_moved, written

    def advance(self, parameters: list[int]) -> None:
        for i in parameters if self._versions else ():
            self._versions[i] += 1


def places() -> _core.Places | _Places:
    """Detects whether the tensors of an optimizer have moved since the last step. ``look`` returns whether
    any tensor has moved, whether a parameter has and, if asked for versions, which parameters others have
    written to. ``advance`` notes parameters that the optimizer itself has written to."""
    reader = tensor_reader()
    return _Places() if reader is None else _core.Places(reader)


@functools.cache
def tensor_reader() -> Optional[_core.TensorReader]:
    """Reads tensors faster than their attributes do; None before torch 2.10."""
    try:
        return _core.TensorReader(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), list(_PLAIN))
    except TypeError:
        return None


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)  # ten times as fast
_core.set_stream_getter(_raw_stream)


def stream_of(device: torch.device) -> int:
    """Torch's current cudaStream_t on a device as a number; 0 for the CPU."""
    return _raw_stream(device.index) if device.type == "cuda" else 0
