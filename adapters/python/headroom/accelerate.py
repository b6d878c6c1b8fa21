"""Headroom in Accelerate, and in Hugging Face's Trainer, which is built on it.

    accelerator = Accelerator(mixed_precision="fp16")
    scaler = headroom.accelerate.plug(accelerator, policy="headroom")
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

Everything else stays as it is: ``accelerator.backward``, ``clip_grad_norm_``, ``save_state``, ``load_state``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from accelerate.optimizer import AcceleratedOptimizer

from headroom._errors import Error, make
from headroom.torch import GradScaler
from headroom.torch._memory import all_zero


def plug(accelerator: Any, *, max_norm: Optional[float] = None, **options: Any) -> GradScaler:
    """Makes an ``Accelerator``, or the one of a ``Trainer``, use a ``headroom.torch.GradScaler(**options)``, which
    is returned. Call it before ``prepare()``, or before ``Trainer.train()``.

    ``max_norm`` clips in the step, with one pass less than ``accelerator.clip_grad_norm_()``; a Trainer then
    needs ``max_grad_norm=0``. ``step_was_skipped`` is right for every optimizer, so that schedulers do not
    advance in skipped steps; reading it waits for a CUDA device. FP16 works on the CPU, too."""
    accelerator = getattr(accelerator, "accelerator", accelerator)
    if accelerator._optimizers:
        raise make("wrong order", "An optimizer was prepared already; call plug() before accelerator.prepare().")
    scaler = GradScaler(accelerator.device.type, **options)
    accelerator.scaler = scaler
    if accelerator.mixed_precision == "fp16":
        accelerator.native_amp = True  # Accelerate has autocast to FP16 on other devices only
    kind = type(accelerator)
    if not isinstance(accelerator, _Plugged):
        accelerator.__class__ = type(kind.__name__, (_Plugged, kind), {})
    accelerator._headroom_max_norm = max_norm
    return scaler


class _Plugged:
    """What a plugged Accelerator does differently."""

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare(*args, **kwargs)  # type: ignore[misc]
        for model in self._models:
            self.scaler.name_parameters(self.unwrap_model(model))
        return prepared

    def prepare_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare_optimizer(*args, **kwargs)  # type: ignore[misc]
        prepared.__class__ = ScaledOptimizer
        prepared.max_norm = self._headroom_max_norm
        prepared.all_prepared = self._optimizers
        return prepared

    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """With ``max_norm=inf``, by which a Trainer measures the norm, FP16 gradients are left as they are: unscaling
        them would make small ones 0."""
        parameters = list(parameters)
        grads = [param.grad for param in parameters if param.grad is not None]
        if max_norm != math.inf or not any(grad.dtype is torch.float16 for grad in grads):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]
        norms = [torch.linalg.vector_norm(grad.float(), norm_type) for grad in grads]
        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), norm_type)
        return norm / self.scaler.get_scale()

    def unscale_gradients(self: Any, optimizer: Any = None) -> None:
        """Accelerate does this in mixed precision only; a model with FP16 weights needs it as well."""
        given = self._optimizers if optimizer is None else optimizer
        for each in given if isinstance(given, (list, tuple)) else [given]:
            while isinstance(each, AcceleratedOptimizer):
                each = each.optimizer
            self.scaler.unscale_(each)


class ScaledOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, which asks the scaler whether a step was skipped. Accelerate's own counts calls of
    ``optimizer.step``, which fused optimizers get in skipped steps, too."""

    max_norm: Optional[float] = None
    all_prepared: Sequence[Any] = ()  # optimizers under the same scaler

    def step(self, closure: Any = None) -> None:
        if not self.gradient_state.sync_gradients:
            return
        try:
            self.scaler.step(self.optimizer, closure, max_norm=self.max_norm)
        except Error as error:
            # torch.distributed.checkpoint makes the optimizer's state by a step with gradients of zero.
            params = (param for group in self.optimizer.param_groups for param in group["params"])
            if error.code != "wrong order" or not all_zero(params):
                raise
            self.optimizer.step(closure)
            return
        if len(self.all_prepared) > 1:
            self.scaler.update_later()  # others may step after the same backward
        else:
            self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        return not self.scaler.was_applied(self.optimizer)
