"""Headroom in Megatron-LM: an object for an optimizer's ``grad_scaler``.

    optimizer = get_megatron_optimizer(config, model_chunks)   # with fp16
    scaler = headroom.megatron.plug(optimizer, policy="headroom")
"""

from __future__ import annotations

from typing import Any, Union

import torch

from headroom._core import ScalePolicy
from headroom._layouts import WRITERS, read
from headroom._plug import Alarm, HostScale

__all__ = ["GradScaler", "plug"]


def plug(optimizer: Any, policy: Union[ScalePolicy, str, None] = None, *, on_alarm: Alarm = None) -> GradScaler:
    """Makes a Megatron optimizer use a ``GradScaler``, which is returned. Call it before a checkpoint is loaded.

    Without ``policy`` it has the settings of Megatron's scaler. The optimizers of a ChainedOptimizer (dense and
    expert parameters) share one scaler: an overflow in any of them lowers the one scale that the loss has. With
    Megatron's scalers, the scales differ from then on, and later gradients are divided by the wrong one."""

    def is_dynamic(scaler: Any) -> bool:
        return isinstance(scaler, GradScaler) or hasattr(scaler, "hysteresis")

    chained = [each for each in getattr(optimizer, "chained_optimizers", [optimizer])
               if is_dynamic(getattr(each, "grad_scaler", None))]
    if not chained:
        raise ValueError("This optimizer has no dynamic grad_scaler; configure fp16 without a constant loss scale.")
    old = chained[0].grad_scaler
    if policy is None and isinstance(old, GradScaler):
        policy = old.state.policy
    elif policy is None:
        policy = ScalePolicy("megatron").replace(
            init_scale=old.scale.item(), min_scale=old.min_scale.item(), growth_factor=old.growth_factor.item(),
            backoff_factor=old.backoff_factor.item(), growth_interval=int(old.growth_interval),
            hysteresis=old.hysteresis)
    scaler = GradScaler(policy, old.scale.device, optimizers=len(chained), on_alarm=on_alarm)
    for each in chained:
        each.grad_scaler = scaler
    return scaler


class GradScaler(HostScale):
    """The interface of Megatron's ``MegatronGradScaler`` over any policy without retry.

    Each of ``optimizers`` optimizers calls ``update()`` once in every step. The scale moves with the last call, so
    that all of them unscale by the scale of the backward."""

    def __init__(
        self,
        policy: Union[ScalePolicy, str] = "megatron",
        device: Any = "cuda",
        *,
        optimizers: int = 1,
        on_alarm: Alarm = None,
    ) -> None:
        super().__init__("Megatron", policy, on_alarm)
        self._found: list[bool] = []  # by the optimizers that have called update() in this step
        self._optimizers = optimizers
        self._scale = torch.tensor([self.state.scale], dtype=torch.float32, device=device)

    def _set_scale(self, scale: float) -> None:
        self._scale = torch.full_like(self._scale, scale)

    @property
    def scale(self) -> torch.Tensor:
        return self._scale

    @property
    def inv_scale(self) -> torch.Tensor:
        return self._scale.double().reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """Moves the scale. Raises headroom.Error, after the update, if scaling cannot help."""
        self._found.append(bool(found_inf))
        if len(self._found) < self._optimizers:
            return
        overflow, before = any(self._found), self.state.scale
        self._found.clear()
        try:
            self._advance(overflow)
        finally:
            if self.state.scale != before:
                self._set_scale(self.state.scale)

    def state_dict(self) -> dict[str, Any]:
        """Megatron's three keys, and all of the state under ``"headroom"``, which Megatron's scaler ignores."""
        return {**WRITERS["megatron"](self.state), "scale": self._scale, **WRITERS["headroom"](self.state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes our own state dictionary with its policy, or scale and counts of Megatron's."""
        self.state = read(state_dict, None if "headroom" in state_dict else self.state.policy)
        self._found.clear()
