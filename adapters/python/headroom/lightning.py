"""Headroom in Lightning: precision plugins for ``lightning.Trainer`` and for ``lightning.Fabric``.

    trainer = lightning.Trainer(plugins=[headroom.lightning.MixedPrecision("cuda", policy="headroom")])
    fabric = lightning.Fabric(plugins=[headroom.lightning.FabricMixedPrecision("cuda", policy="headroom")])
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from lightning.fabric.plugins.precision.amp import MixedPrecision as FabricPlugin
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision as TrainerPlugin
from torch.amp.grad_scaler import OptState

from headroom.torch import GradScaler
from headroom.torch._binding import takes_scale


class _Scaled:
    """What both plugins have."""

    scaler: GradScaler

    def __init__(self, device: str = "cuda", *, scaler: Optional[GradScaler] = None, **options: Any) -> None:
        super().__init__("16-mixed", device, scaler or GradScaler(device, **options))  # type: ignore[call-arg]

    @property
    def last_step_applied(self) -> bool:
        """Whether the last step ran. Waits for a CUDA device."""
        return self.scaler.last_step_applied


class MixedPrecision(_Scaled, TrainerPlugin):
    """FP16 autocast with ``headroom.torch.GradScaler(device, **options)``, as ``plugins=[...]`` of a Trainer.

    With fused optimizers, torch's or ours, ``gradient_clip_val`` clips in the step, and gradients are still scaled
    in ``on_before_optimizer_step``. For others they are unscaled there, as with Lightning's own plugin. The
    class has the name of Lightning's, under which checkpoints keep the scaler's state."""

    def __init__(self, device: str = "cuda", *, scaler: Optional[GradScaler] = None, **options: Any) -> None:
        super().__init__(device, scaler=scaler, **options)
        self._max_norms: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()  # of the next step
        self._named: Optional[weakref.ref[Any]] = None

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # raises
        if self._named is None or self._named() is not model:
            self.scaler.name_parameters(model)
            self._named = weakref.ref(model)
        loss = closure()
        without_backward = loss is None and model.automatic_optimization
        if not takes_scale(optimizer) and not without_backward:
            self._unscale(optimizer)
        self._after_closure(model, optimizer)
        if without_backward:
            return loss
        result = self.scaler.step(optimizer, max_norm=self._max_norms.pop(optimizer, None), **kwargs)
        if len(model.trainer.optimizers) > 1:
            self.scaler.update_later()  # others may step after the same backward
        else:
            self.scaler.update()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
        optimizer = _unwrapped(optimizer)
        algorithm = kwargs.get("gradient_clip_algorithm", args[0] if args else "norm")
        if not clip_val or clip_val <= 0:
            return
        if takes_scale(optimizer) and algorithm == "norm":
            self._max_norms[optimizer] = clip_val  # the step clips
            return
        self._unscale(optimizer)
        if algorithm == "norm":
            self.clip_grad_by_norm(optimizer, clip_val)
        else:
            self.clip_grad_by_value(optimizer, clip_val)

    def _unscale(self, optimizer: Any) -> None:
        if self.scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.UNSCALED:
            self.scaler.unscale_(optimizer)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside what ``LightningModule.optimizers()`` returns."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


class FabricMixedPrecision(_Scaled, FabricPlugin):
    """As MixedPrecision, for ``Fabric(plugins=[...])``. ``fabric.clip_gradients()`` takes fused optimizers."""

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            return super().optimizer_step(optimizer, **kwargs)  # raises
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update_later()  # other optimizers may step after the same backward
        return result

    def unscale_gradients(self, optimizer: Any) -> None:
        self.scaler.unscale_(optimizer)
