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
    sum, and no verdict is possible any more; one that leaves them alone, as of another network's loss, is allowed.
    Mixed gradients are refused until they are cleared, in later rounds too; an optimizer that is not stepped may keep
    them, as the discriminator of a GAN that sits out a round."""

    def __init__(self) -> None:
        self._cores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._mixed: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, optimizer: torch.optim.Optimizer, core: _core.Optimizer) -> None:
        self._cores[optimizer] = core

    def end_round(self) -> None:
        self._cores.clear()

    def backward_began(self, scaler: _core.GradScaler) -> None:
        """Called from the backward of a scaled loss, before it adds to any gradient."""
        for optimizer in list(self._mixed):
            if not any(grad is not None and local(grad).abs().sum() for grad in _gradients(optimizer)):
                self._mixed.discard(optimizer)
        seen = [(weakref.ref(optimizer), _versions(_gradients(optimizer)), _copies_of_views(_gradients(optimizer)))
                for optimizer, core in self._cores.items() if scaler.is_unscaled(core)]
        if not seen:
            return

        def compare() -> None:
            for reference, versions, copies in seen:
                optimizer = reference()
                if optimizer is not None and _have_changed(_gradients(optimizer), versions, copies):
                    self._mixed.add(optimizer)

        # At the end of backward, and then after the callbacks that are queued later: FSDP reduces gradients in one.
        _at_the_end(lambda: _at_the_end(compare))

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises if the gradients of this optimizer are sums of unscaled and scaled ones."""
        if optimizer in self._mixed:
            raise make("wrong order", f"A scaled loss has added to the gradients of {type(optimizer).__name__} after "
                       "unscale_() had divided them, so that two scales are in one sum. Run all backwards first and "
                       "unscale then; to drop these gradients call zero_grad() and scaler.discard().")


def _gradients(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


def _versions(grads: list[Any]) -> list[Any]:
    """Equal before and after a backward that has not touched the gradients."""
    # FSDP adds to the local shard of a DTensor, autograd to the DTensor. Inference tensors have no version, and autograd
    # raises rather than add to one.
    return [None if grad is None or grad.is_inference() else (id(grad), grad._version, local(grad)._version)
            for grad in grads]


def _copies_of_views(grads: list[Any]) -> dict[int, torch.Tensor]:
    """The values of gradients whose versions change with others in the same buffer, as under DDP with
    ``gradient_as_bucket_view``."""
    return {i: grad.detach().clone() for i, grad in enumerate(grads)
            if grad is not None and grad._is_view() and local(grad) is grad}


def _have_changed(grads: list[Any], versions: list[Any], copies: dict[int, torch.Tensor]) -> bool:
    changed = [i for i, (before, now) in enumerate(zip(versions, _versions(grads))) if before != now]
    # DDP divides gradients that this backward does not have by the number of ranks, and adds them up again.
    return any(i not in copies or grads[i] is None
               or not torch.allclose(grads[i], copies[i], rtol=1e-5, atol=0.0, equal_nan=True) for i in changed)


def _at_the_end(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
