"""Finds gradients of scaled losses that were added to gradients which unscale_() had divided already."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from headroom import _core
from headroom._errors import make
from headroom.torch._memory import local


class UnscaledGradients:
    """The optimizers between ``unscale_()`` and ``step()``. A backward that changes their gradients mixes scales in one
    sum, and no verdict is possible any more; one that leaves them alone, as of another network's loss, is allowed."""

    def __init__(self) -> None:
        self._cores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._mixed: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, optimizer: torch.optim.Optimizer, core: _core.Optimizer) -> None:
        self._cores[optimizer] = core

    def clear(self) -> None:
        self._cores.clear()
        self._mixed.clear()

    def backward_began(self, scaler: _core.GradScaler) -> None:
        """Called from the backward of a scaled loss, before it adds to any gradient."""
        seen = [(weakref.ref(optimizer), _versions(optimizer)) for optimizer, core in self._cores.items()
                if scaler.is_unscaled(core)]
        if not seen:
            return

        def compare() -> None:
            for reference, versions in seen:
                optimizer = reference()
                if optimizer is not None and _versions(optimizer) != versions:
                    self._mixed.add(optimizer)

        # At the end of backward, and then after the callbacks that are queued later: FSDP reduces gradients in one.
        _at_the_end(lambda: _at_the_end(compare))

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises if the gradients of this optimizer are sums of unscaled and scaled ones."""
        if optimizer in self._mixed:
            raise make("wrong order", f"A scaled loss has added to the gradients of {type(optimizer).__name__} after "
                       "unscale_() had divided them, so that two scales are in one sum. Run all backwards first and "
                       "unscale then; to drop these gradients call zero_grad() and scaler.discard().")

    def check_all(self) -> None:
        """The same for every optimizer that still has such gradients."""
        for optimizer in list(self._mixed):
            if any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
                self.check(optimizer)


def _versions(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Equal before and after a backward that has not touched the gradients."""
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    # FSDP adds to the local shard of a DTensor, autograd to the DTensor. Inference tensors have no version, and autograd
    # raises rather than add to one.
    return [None if grad is None or grad.is_inference() else (id(grad), grad._version, local(grad)._version) for grad in grads]


def _at_the_end(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
