"""Headroom in fairseq2: a ``Float16LossScaler``.

    trainer = Trainer(..., fp16_loss_scaler=headroom.fairseq2.LossScaler(policy="headroom"))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch

from headroom._core import AlarmReport, ScalePolicy
from headroom._errors import make
from headroom._layouts import WRITERS, read
from headroom._plug import Alarm, policy_for
from headroom.torch import GradScaler

__all__ = ["LossScaleResult", "LossScaler"]


@dataclass(frozen=True)
class LossScaleResult:
    """The fields of fairseq2's ``Float16LossScaleResult``."""

    old_scale: float
    new_scale: float
    scaled: bool = False  # the scale has grown
    overflowed: bool = False  # the step was skipped
    exploded: bool = False  # it overflowed and scaling cannot help; fairseq2 ends the run


class LossScaler:
    """fairseq2's ``Float16LossScaler`` interface over ``headroom.torch.GradScaler(device, **options)``.

    Without ``policy`` the scales are those of fairseq2's own scaler. ``overflowed`` comes from the step, not from
    the scale, and is right with every policy. ``grad_scaler`` has the report on the last step."""

    def __init__(
        self, policy: Union[ScalePolicy, str, None] = None, *, device: str = "cuda", on_alarm: Alarm = None, **options: Any
    ) -> None:
        chosen = policy_for("fairseq2", "fairseq2" if policy is None else policy)
        self.grad_scaler = GradScaler(device, policy=chosen, on_alarm=self._note_alarm, **options)
        self._layout = "fairseq2" if policy is None else "headroom"
        self._on_alarm = on_alarm
        self._alarm: Optional[AlarmReport] = None

    def _note_alarm(self, alarm: AlarmReport) -> None:
        self._alarm = alarm
        if self._on_alarm is not None:
            self._on_alarm(alarm)

    @property
    def scale_window(self) -> int:
        return getattr(self.grad_scaler.policy, "growth_interval", 0)

    def backward(self, loss: torch.Tensor) -> None:
        self.grad_scaler.scale(loss).backward()

    def unscale_grads_(self, optimizer: torch.optim.Optimizer) -> None:
        self.grad_scaler.unscale_(optimizer)

    def run_optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Optional[Callable[[], float]] = None
    ) -> LossScaleResult:
        """Steps and moves the scale. Waits for a CUDA device, as fairseq2's own does."""
        if closure is not None:
            raise make("unsupported", "A closure would compute gradients of a loss that is not scaled.")
        old = self.grad_scaler.get_scale()
        self._alarm = None
        self.grad_scaler.step(optimizer)
        self.grad_scaler.update()
        new, policy = self.grad_scaler.get_scale(), self.grad_scaler.policy
        overflowed = not self.grad_scaler.was_applied(optimizer)
        at_floor = policy.rule == "dynamic" and new <= policy.min_scale
        exploded = overflowed and (at_floor or self._alarm is not None)
        return LossScaleResult(old, new, scaled=new > old, overflowed=overflowed, exploded=exploded)

    def state_dict(self) -> dict[str, object]:
        """Without ``policy``: fairseq2's. With one: ``"headroom"``, policy and state as JSON text."""
        return WRITERS[self._layout](read(self.grad_scaler.state_dict()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes our own state dictionary with its policy, or scale and counts of fairseq2's."""
        own = "headroom" in state_dict
        state = read(state_dict) if own else read(state_dict["grad_scaler"], self.grad_scaler.policy)
        self.grad_scaler.load_state_dict(WRITERS["headroom"](state))
