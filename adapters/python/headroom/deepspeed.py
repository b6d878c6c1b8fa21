"""Headroom in DeepSpeed: an object for the ``loss_scaler`` of a ZeRO optimizer (stages 1 to 3).

    engine, *_ = deepspeed.initialize(model=model, config=config)   # with "fp16": {"enabled": true}
    scaler = headroom.deepspeed.plug(engine, policy="headroom")
"""

from __future__ import annotations

from typing import Any, Union

from headroom._core import ScalePolicy
from headroom._layouts import WRITERS, layout_of, read, under
from headroom._plug import Alarm, HostScale

__all__ = ["LossScaler", "plug"]


def plug(engine: Any, policy: Union[ScalePolicy, str, None] = None, *, on_alarm: Alarm = None) -> LossScaler:
    """Makes a DeepSpeed engine, or its ZeRO optimizer, use a ``LossScaler``, which is returned.

    Without ``policy`` it has the settings and the state of DeepSpeed's scaler. With one, it starts as the policy
    says, or in a run that was resumed with the scale of that run. Call it again after ``load_checkpoint()`` of a
    checkpoint without Headroom."""
    optimizer = getattr(engine, "optimizer", engine)
    old = getattr(optimizer, "loss_scaler", None)
    fields = old.__getstate__() if isinstance(old, LossScaler) else vars(old) if old is not None else {}
    if layout_of(fields) is None:
        raise ValueError("This optimizer has no dynamic loss scaler; configure fp16 with ZeRO stage 1, 2 or 3.")
    found = read(fields)
    scaler = LossScaler(found.policy if policy is None else policy, on_alarm=on_alarm)
    if policy is None or found.steps > 0:
        scaler.state = under(found, scaler.state.policy)
    optimizer.loss_scaler = scaler
    return scaler


class LossScaler(HostScale):
    """The interface of DeepSpeed's scalers over any policy without retry.

    A new scale is used from the next loss on. With DeepSpeed's own scaler, gradients of the step in which the
    scale grows are divided by the new scale, twice the scale of their backward."""

    dynamic = True

    def __init__(self, policy: Union[ScalePolicy, str] = "deepspeed", *, on_alarm: Alarm = None) -> None:
        super().__init__("DeepSpeed", policy, on_alarm)
        self._used = self.state.scale  # by the last loss

    def _set_scale(self, scale: float) -> None:
        self._used = scale

    @property
    def cur_scale(self) -> float:
        """The scale of the last loss, which its gradients are divided by."""
        return self._used

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self.state = self.state.replace(scale=float(scale))

    loss_scale = cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Moves the scale. Raises headroom.Error, after the update, if scaling cannot help."""
        self._advance(overflow)

    def scale_loss(self, loss: Any) -> Any:
        """loss x scale; FP16 and BF16 losses become FP32."""
        self._used = self.state.scale
        return (loss.float() if loss.is_floating_point() and loss.element_size() < 4 else loss) * self._used

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    # DeepSpeed's checkpoints contain the pickled object.
    def __getstate__(self) -> dict[str, Any]:
        return WRITERS["headroom"](self.state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.state = read(state)
