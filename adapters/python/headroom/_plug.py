"""What the plugs for frameworks that find overflows themselves have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional, Union

from headroom._core import AlarmReport, ScalePolicy, ScaleState
from headroom._errors import make

Alarm = Optional[Callable[[AlarmReport], None]]


def policy_for(framework: str, policy: Union[ScalePolicy, str]) -> ScalePolicy:
    """The policy; raises headroom.Error for one that asks for what the framework's loop cannot do."""
    if isinstance(policy, str):
        policy = ScalePolicy(policy)
    if getattr(policy, "retry", False):
        raise make("unsupported", f"{framework} cannot retry a batch; use a policy without retry.")
    if policy.on_overflow == "throw":
        raise make("unsupported", f"{framework} skips overflows itself; use a policy with on_overflow='skip'.")
    return policy


class HostScale:
    """A ScaleState on the host whose alarms go to ``on_alarm`` or are raised as headroom.Error. The framework
    reports only whether a step overflowed; the ``headroom`` rule then works without the largest gradient."""

    def __init__(self, framework: str, policy: Union[ScalePolicy, str], on_alarm: Alarm) -> None:
        self._state = ScaleState(policy_for(framework, policy))
        self._on_alarm = on_alarm

    @property
    def state(self) -> ScaleState:
        """Policy, scale and counts: ``scaler.state.skipped``."""
        return self._state

    @state.setter
    def state(self, state: ScaleState) -> None:
        self._state = state
        self._set_scale(state.scale)

    def _set_scale(self, scale: float) -> None:
        """Uses the scale of a new state from now on."""

    def _advance(self, overflow: bool) -> None:
        """One update. If it raises, the update has been made."""
        alarm = self._state.advance(bool(overflow))
        if alarm is not None and self._on_alarm is not None:
            self._on_alarm(alarm)
        elif alarm is not None:
            raise make("scale collapsed", str(alarm))
