"""Converts arrays of all libraries to views that the core can use."""

from __future__ import annotations

import math
import sys
from typing import Any, Optional

from headroom import _core

_CUDA_TYPES = {"<f2": "float16", "<f4": "float32", "<f8": "float64"}


def tensor(array: Any, dtype: Optional[str] = None) -> _core.Tensor:
    """A view of an array, without a copy.

    Accepts objects with the buffer protocol (NumPy, ``array.array``, ``memoryview``), DLPack
    (PyTorch, CuPy, JAX) or ``__cuda_array_interface__`` that are contiguous and of float16, bfloat16,
    float32 or float64. ``dtype`` is the meaning of 16-bit integers. The view keeps the array alive.
    Raises TypeError for other objects, and headroom.Error or ValueError for other arrays.

    >>> import numpy as np
    >>> t = tensor(np.zeros((2, 3), np.float16))
    >>> len(t), t.dtype, t.device, t.read_only
    (6, 'f16', 'cpu', False)
    >>> tensor(np.zeros(4, np.uint16), dtype="bfloat16").dtype
    'bf16'
    """
    if isinstance(array, _core.Tensor):
        return array
    if hasattr(array, "detach"):  # torch refuses DLPack for tensors that require grad
        array = array.detach()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray) and array.dtype.name == "bfloat16":
        array, dtype = array.view(numpy.uint16), "bfloat16"  # ml_dtypes does not support the buffer protocol
    try:
        memoryview(array)
    except (TypeError, ValueError, BufferError):
        pass
    else:
        return _core.Tensor.from_buffer(array, dtype)
    if hasattr(array, "__dlpack__"):
        try:
            capsule = array.__dlpack__(max_version=(1, 0))
        except TypeError:  # a library from before DLPack 1.0
            capsule = array.__dlpack__()
        view = _core.Tensor.from_capsule(capsule)
        # JAX's arrays are immutable, but not all of its capsules have the read-only flag.
        return view.frozen() if type(array).__module__.split(".")[0] in ("jax", "jaxlib") else view
    if hasattr(array, "__cuda_array_interface__"):
        return _from_cuda_array(array, dtype)
    raise TypeError(
        f"{type(array).__name__} has neither the buffer protocol nor DLPack nor "
        "__cuda_array_interface__; pass an array."
    )


def _from_cuda_array(array: Any, dtype: Optional[str]) -> _core.Tensor:
    interface = array.__cuda_array_interface__
    if interface.get("strides") is not None:
        raise ValueError("The CUDA array is not contiguous; copy it first.")
    pointer, read_only = interface["data"]
    name = _CUDA_TYPES.get(interface["typestr"], dtype if interface["typestr"] == "<u2" else None)
    if name is None:
        raise ValueError(f"The CUDA array has type {interface['typestr']}; see headroom.tensor().")
    device = getattr(getattr(array, "device", None), "id", 0)
    count = math.prod(interface["shape"])
    return _core.Tensor.from_pointer(pointer, name, count, device, read_only, array)
