"""GradScaler, measure, measure_detail and unscale_ for arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Optional, Union

from headroom import _core
from headroom._optim import Optimizer
from headroom._tensor import tensor


def measure(grads: Iterable[Any]) -> _core.GradStats:
    """Reads every array once and returns inf and nan counts, norm, largest magnitude, first bad array.

    >>> import numpy as np
    >>> stats = measure([np.array([3, 4], np.float16), np.array([0, np.inf], np.float32)])
    >>> stats.count, stats.inf_count, stats.amax, stats.culprit, stats.norm
    (4, 1, 4.0, 1, inf)
    """
    return _core.measure([tensor(grad) for grad in grads])


def measure_detail(grads: Iterable[Any]) -> tuple[_core.GradStats, _core.GradDetail]:
    """``measure()`` with counts of zeros and subnormals and a histogram of magnitudes.

    >>> import numpy as np
    >>> stats, detail = measure_detail([np.array([0, 1, 1.5, 4, 6e-8], np.float16)])
    >>> detail.zeros, detail.subnormals, detail.histogram
    (1, 1, {-24: 1, 0: 2, 2: 1})
    """
    return _core.measure_detail([tensor(grad) for grad in grads])


def unscale_(grads: Iterable[Any], inverse_scale: float) -> _core.GradStats:
    """Multiplies gradients in place. The result describes them before, and counts new inf and zeros.

    >>> import numpy as np
    >>> grad = np.array([2.0, 4.0], np.float16)
    >>> unscale_([grad], 1 / 4).ok, grad
    (True, array([0.5, 1. ], dtype=float16))
    """
    return _core.unscale_([tensor(grad) for grad in grads], inverse_scale)


class GradScaler:
    """Scales losses, unscales gradients, skips bad steps, adapts the scale.

    ``policy`` is a ScalePolicy (StaticScale, DynamicScale, HeadroomScale) or text, a preset optionally
    with other settings: ``"torch:growth_interval=500"``. ``device`` is where the scale is stored:
    ``"cpu"``, or for example ``"cuda:0"``. On CUDA step() and update() never wait, and report() returns
    the outcome. ``on_alarm`` is called by update() when the scale is at its minimum or too many steps
    were skipped; without it update() raises headroom.Error.

    >>> import numpy as np
    >>> import headroom
    >>> weight, grad = np.zeros(4, np.float16), np.zeros(4, np.float16)
    >>> optimizer = headroom.AdamW({"w": (weight, grad)}, lr=1e-3)
    >>> scaler = GradScaler("torch")
    >>> grad[:] = scaler.scale(1e-6)                # backward of the scaled loss
    >>> print(scaler.step(optimizer, max_norm=1.0))
    applied at scale 65536: norm 2.00048e-06
    >>> scaler.update()
    >>> _ = scaler.scale(1.0); grad[2] = np.inf
    >>> print(scaler.step(optimizer)); scaler.update(); scaler.get_scale()
    skipped at scale 65536: w: 1 inf, 0 nan
    32768.0
    """

    def __init__(
        self,
        policy: Union[_core.ScalePolicy, str] = "dynamic",
        *,
        enabled: bool = True,
        device: str = "cpu",
        on_alarm: Optional[Callable[[_core.AlarmReport], None]] = None,
    ) -> None:
        if isinstance(policy, str):
            policy = _core.ScalePolicy(policy)
        kind, _, index = device.partition(":")
        if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
            raise ValueError(f"device is {device!r}; it must be 'cpu', 'cuda' or for example 'cuda:0'.")
        place = int(index or 0) if kind == "cuda" else -1
        self._core = _core.GradScaler(policy, enabled, place, on_alarm, 0)

    @property
    def policy(self) -> _core.ScalePolicy:
        """Assign to change it: ``scaler.policy = scaler.policy.replace(growth_interval=100)``."""
        return self._core.policy

    @policy.setter
    def policy(self, policy: _core.ScalePolicy) -> None:
        self._core.set_policy(policy, 0)

    @property
    def enabled(self) -> bool:
        return self._core.enabled

    def get_scale(self) -> float:
        """The scale by which the next loss is multiplied; waits for a CUDA device."""
        return self._core.get_scale(0)

    def scale(self, loss: Any, out: Optional[Any] = None) -> Any:
        """loss x scale. Returns a float for a number. For an array pass ``out``, a float32 array (which
        may be the loss itself), which is filled and returned."""
        if out is None:
            return self._core.scale(float(loss))
        self._core.scale_into(tensor(loss), tensor(out), 0)
        return out

    def unscale_(self, optimizer: Optimizer) -> _core.GradStats:
        """Divides the gradients by the scale in place, to clip or inspect them before the step.
        If no step follows, ``update()`` multiplies them by the scale again."""
        return self._core.unscale_(optimizer._core, 0)

    def step(
        self,
        optimizer: Optimizer,
        *,
        max_norm: float = 0.0,
        skip_above_norm: float = 0.0,
        clear_grads: str = "on_skip",
    ) -> _core.StepReport:
        """Measures the gradients, and applies or skips the step. ``max_norm`` clips the norm of the
        unscaled gradients; ``skip_above_norm`` skips a step whose norm exceeds it. ``clear_grads`` is
        when gradients are zeroed: ``"on_skip"``, ``"always"`` or ``"never"``."""
        return self._core.step(optimizer._core, max_norm, skip_above_norm, clear_grads)

    def update(self, new_scale: Optional[float] = None) -> None:
        """Adapts the scale to the outcome of the steps since the last update, or sets it."""
        if new_scale is None:
            self._core.update(0)
        else:
            self._core.set_scale(new_scale, 0)

    def retry(self) -> bool:
        """After ``update()`` with a policy that retries (``"headroom-retry"``): whether to run the
        last batch again, because it was skipped and the scale has been lowered. With such a policy
        ``step()`` refuses a second optimizer in a round."""
        return self._core.retry(0)

    def report(self) -> _core.StepReport:
        """The outcome of the last step; waits for a CUDA device."""
        return self._core.report(0)

    def try_report(self) -> Optional[_core.StepReport]:
        """The outcome of the newest finished step, without waiting; None if there is none."""
        return self._core.try_report(0)

    def discard(self) -> None:
        """Call this after dropping the gradients of scaled losses without a step."""
        self._core.discard(0)

    def save(self) -> str:
        """Policy and state as JSON, for ``load()``. Raises headroom.Error between a step and its update."""
        return self._core.save(0)

    def load(self, text: str) -> None:
        """Restores policy and state. Raises headroom.Error, changing nothing, if the text is damaged."""
        self._core.load(text, 0)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("A headroom.GradScaler cannot be pickled; use save() and load().")
