"""inspect(): is a checkpoint or a model safe in FP16?"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Union

from headroom import _core
from headroom._tensor import tensor
from headroom._tools import Path


def inspect(weights: Union[Path, Iterable[Path], Mapping[str, Any], Any], *, lose: float = 0.01) -> _core.WeightReport:
    """Says whether weights are safe in FP16, as ``headroom inspect --weights`` does. Print the result.

    ``weights`` is a safetensors file, an index of shards, a folder of them, a list of such paths, a PyTorch module,
    or a dict of arrays or tensors. Weights are unsafe if one overflows, if there is inf or NaN, or if more than the
    share ``lose`` of a tensor's nonzero weights become zero. Tensors of integers are left out, and so are numbers,
    text and None in a dict. A floating-point type that is not read (FP8) and other objects leave the verdict open:
    ``safe`` and ``complete`` are False. Tensors on a device are copied to host memory, one at a time; of a DTensor
    the local shard is read. Of a module's buffers, those that are not saved are left out, and -inf and the lowest
    number of a type count as zero: attention masks have them on purpose.

    >>> import numpy as np
    >>> report = inspect({"w": np.array([1.0, 7e4], np.float32), "b": np.zeros(2, np.float32)})
    >>> report.safe, report.keep_fp32
    (False, ['w'])
    >>> report.verdict
    'Unsafe in FP16: 1 weight overflows (the largest is 7e+04 in w, FP16 ends at 65504). Keep in FP32: w.'
    """
    inspector = _core.WeightInspector(lose)
    if isinstance(weights, (str, os.PathLike)):
        inspector.add_files([os.fspath(weights)])
    elif isinstance(weights, (list, tuple)) and all(isinstance(path, (str, os.PathLike)) for path in weights):
        inspector.add_files([os.fspath(path) for path in weights])
    elif isinstance(weights, Mapping):
        for name, array in weights.items():
            _add(inspector, name, array)
    elif hasattr(weights, "named_parameters"):  # state_dict() may hold other things than tensors
        for name, array in weights.named_parameters():
            _add(inspector, name, array)
        for name, array in _saved_buffers(weights):
            _add(inspector, name, array, is_buffer=True)
    else:
        raise TypeError(f"inspect() takes paths, a torch module or a dict of arrays, not {type(weights).__name__}.")
    return inspector.finish()


def _saved_buffers(module: Any) -> Iterator[tuple[str, Any]]:
    """The buffers that a checkpoint would hold. Others are computed when the model is built, such as masks."""
    skipped = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in skipped)


def _without_mask(buffer: Any) -> Any:
    import torch

    return buffer.masked_fill((buffer == -torch.inf) | (buffer == torch.finfo(buffer.dtype).min), 0)


def _add(inspector: _core.WeightInspector, name: str, array: Any, is_buffer: bool = False) -> None:
    if array is None or isinstance(array, (str, bytes, bool, int, float)):
        return  # a setting that is saved beside the weights
    if isinstance(array, _core.Tensor) or not hasattr(array, "dtype"):
        try:
            view = tensor(array)
        except (TypeError, ValueError):
            inspector.leave_out(name, type(array).__name__, 0)
        else:
            inspector.add(name, view, [len(view)])
        return
    dtype = str(array.dtype).rpartition(".")[2]
    shape = [int(extent) for extent in array.shape]
    if getattr(array.dtype, "byteorder", "=") == ">":  # whose name in NumPy is ">f4", not "float32"
        array = array.astype(array.dtype.newbyteorder("="))
        dtype = str(array.dtype)
    if dtype not in ("float16", "bfloat16", "float32", "float64") or getattr(array, "is_sparse", False):
        inspector.leave_out(name, dtype, math.prod(shape))
        return
    if hasattr(array, "detach"):
        array = array.detach()
        if hasattr(array, "to_local"):
            array = array.to_local()
        if array.device.type == "meta":
            raise ValueError(f"'{name}' is on the meta device and has no values; load the weights first.")
        array = array.cpu().contiguous()
        if is_buffer:
            array = _without_mask(array)
    elif hasattr(array, "flags") and not getattr(array.flags, "c_contiguous", True):
        array = array.copy(order="C")
    view = tensor(array)
    if view.device != "cpu":
        raise ValueError(f"'{name}' is on {view.device}; copy it to host memory first.")
    inspector.add(name, view, shape)
