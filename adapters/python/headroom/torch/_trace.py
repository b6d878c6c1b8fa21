"""Follows one forward and backward pass operation by operation; ``_core.RangeTrace`` measures every result.

A TorchFunctionMode sees each call of the torch API after autograd has recorded it: its name, its inputs and its
result. A hook on the result measures the gradient that backward brings. The mode is off during backward, so that
activations which are computed again there (checkpointing) do not appear twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headroom import _core
from headroom.torch._memory import _CODES, local, stream_of, tensor_reader, view_of

_UNREADABLE = -2  # instead of a row: the tensor has no memory that can be read


class Trace(TorchFunctionMode):
    """The operations of one watched step."""

    def __init__(self, table: _core.RangeTable, modules: dict[str, torch.nn.Module], shards: bool) -> None:
        """``shards``: processes share the parameters or their gradients, whose memory changes during the step."""
        super().__init__()
        self.modules: list[tuple[str, Any]] = []  # that are running, outermost first
        self.paused = False  # while FSDP gathers parameters
        # The module that a parameter or buffer belongs to, and its name there, by id.
        owners = {id(value): (module, key) for module, owner in modules.items()
                  for values in (owner._parameters, owner._buffers) if values for key, value in values.items()}
        self.core = _core.RangeTrace(table, tensor_reader(), tuple(_CODES), torch.Tensor, torch.nn.Parameter, _measure,
                                     self.modules, owners, shards)
        self._follow = self.core.follow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if not self.paused:
            self._follow(func, args, kwargs, result)
        return result


def _measure(table: _core.RangeTable, tensor: torch.Tensor) -> int:
    """The row of a tensor that the core cannot read by itself: a wrapper of others, elements with gaps."""
    try:
        tensor = local(tensor).detach()
        view = view_of(tensor)
        if view is None:
            tensor = _compact(tensor)  # alive until it has been measured
            view = view_of(tensor)
        if view is None or (not tensor.data_ptr() and tensor.numel()):  # the storage was freed
            return _UNREADABLE
    except RuntimeError:  # no memory of its own, as inside of vmap
        return _UNREADABLE
    return table.measure(view, stream_of(tensor.device))


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor with the same elements; those of expanded dimensions once."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.contiguous()
