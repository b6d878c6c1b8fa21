"""GradScaler and measure over arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Optional, Union

from headroom import _core
from headroom._optim import Optimizer
from headroom._tensor import tensor


def measure(grads: Iterable[Any]) -> _core.GradStats:
    """Reads every array once: inf, nan, norm, largest magnitude, first bad array.

    >>> import numpy as np
    >>> stats = measure([np.array([3, 4], np.float16), np.array([0, np.inf], np.float32)])
    >>> stats.count, stats.inf_count, stats.amax, stats.culprit, stats.norm
    (4, 1, 4.0, 1, inf)
    """
    return _core.measure([tensor(grad) for grad in grads])


def measure_detail(grads: Iterable[Any]) -> tuple[_core.GradStats, _core.GradDetail]:
    """``measure()``, and in the same read zeros, subnormals and a histogram of magnitudes.

    >>> import numpy as np
    >>> stats, detail = measure_detail([np.array([0, 1, 1.5, 4, 6e-8], np.float16)])
    >>> detail.zeros, detail.subnormals, detail.histogram
    (1, 1, {-24: 1, 0: 2, 2: 1})
    """
    return _core.measure_detail([tensor(grad) for grad in grads])


def unscale_(grads: Iterable[Any], inverse_scale: float) -> _core.GradStats:
    """Multiplies gradients in place, and says what was found and lost.

    >>> import numpy as np
    >>> grad = np.array([2.0, 4.0], np.float16)
    >>> unscale_([grad], 1 / 4).ok, grad
    (True, array([0.5, 1. ], dtype=float16))
    """
    return _core.unscale_([tensor(grad) for grad in grads], inverse_scale)


class GradScaler:
    """Scales losses, unscales gradients, skips bad steps, adapts the scale.

    ``policy`` is a ScalePolicy (StaticScale, DynamicScale, HeadroomScale), or a preset as text, with
    other settings if need be: ``"torch:growth_interval=500"``. ``device`` is ``"cpu"``, or
    ``"cuda:0"`` for a scale that lives there: then step() and update() never wait, and report()
    returns the result.

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
            raise ValueError(f"device is {device!r}; it is 'cpu', 'cuda' or 'cuda:0'.")
        place = int(index or 0) if kind == "cuda" else -1
        self._core = _core.GradScaler(policy, enabled, place, on_alarm, 0)

    @property
    def policy(self) -> _core.ScalePolicy:
        """Set it to change how the scale moves: ``scaler.policy.replace(growth_interval=100)``."""
        return self._core.policy

    @policy.setter
    def policy(self, policy: _core.ScalePolicy) -> None:
        self._core.set_policy(policy)

    @property
    def enabled(self) -> bool:
        return self._core.enabled

    def get_scale(self) -> float:
        """The scale that the next loss is multiplied by; waits for a CUDA device."""
        return self._core.get_scale()

    def scale(self, loss: Any, out: Optional[Any] = None) -> Any:
        """loss x scale. A number comes back as a float; of an array, ``out`` (float32, which may be
        the loss itself) takes the result and is returned."""
        if out is None:
            return self._core.scale(float(loss))
        self._core.scale_into(tensor(loss), tensor(out), 0)
        return out

    def unscale_(self, optimizer: Optimizer) -> _core.GradStats:
        """Divides the gradients by the scale, in place, for those who clip or look by hand.
        Without a step, ``update()`` multiplies them by the scale again."""
        return self._core.unscale_(optimizer._core, 0)

    def step(
        self,
        optimizer: Optimizer,
        *,
        max_norm: float = 0.0,
        skip_above_norm: float = 0.0,
        clear_grads: str = "on_skip",
    ) -> _core.StepReport:
        """Measures, decides, and applies or skips. ``max_norm`` clips the norm of the unscaled
        gradients, ``skip_above_norm`` skips a step whose norm is above it. ``clear_grads`` is when
        gradients are zeroed: ``"on_skip"``, ``"always"`` or ``"never"``."""
        return self._core.step(optimizer._core, max_norm, skip_above_norm, clear_grads)

    def update(self, new_scale: Optional[float] = None) -> None:
        """Moves the scale by what the steps since the last update found, or sets it."""
        if new_scale is None:
            self._core.update(0)
        else:
            self._core.set_scale(new_scale, 0)

    def retry(self) -> bool:
        """After ``update()``, with a policy that retries (``"headroom-retry"``): whether to run the
        last batch again, because it was skipped and the scale is lower now. With such a policy a
        second optimizer in one round is refused."""
        return self._core.retry()

    def report(self) -> _core.StepReport:
        """What the last step did; waits for it."""
        return self._core.report()

    def try_report(self) -> Optional[_core.StepReport]:
        """The newest step that is done, without waiting; None if there is none."""
        return self._core.try_report()

    def discard(self) -> None:
        """Call after gradients of scaled losses were dropped without a step."""
        self._core.discard()

    def save(self) -> str:
        """Policy and state as JSON text; and ``load`` takes it back."""
        return self._core.save()

    def load(self, text: str) -> None:
        self._core.load(text)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("A headroom.GradScaler cannot be pickled; keep save() and load() it.")
