"""The settings and the saved state of headroom.torch.GradScaler, by torch's names."""

from __future__ import annotations

import json
from typing import Any

import torch

from headroom import _core
from headroom._errors import Error, make
from headroom.torch._arguments import is_torchs_policy, with_torch_state


class ScalerSettings(torch.amp.GradScaler):
    """A base of GradScaler: its policy, torch's getters and setters, state dicts, copies and pickles."""

    _core: Any
    _follows_torch: bool  # no policy was given to the constructor
    _made_anew: frozenset[str]  # attributes that copies and pickles make anew

    @property
    def policy(self) -> _core.ScalePolicy:
        """Set it to change how the scale moves: ``scaler.policy.replace(growth_interval=100)``."""
        return self._core.policy

    @policy.setter
    def policy(self, policy: _core.ScalePolicy) -> None:
        self._core.set_policy(policy)

    def get_scale(self) -> float:
        """The scale that the next loss is multiplied by; waits for a CUDA device."""
        return self._core.get_scale()

    def _setting(self, name: str) -> Any:
        if not self._enabled:
            raise AttributeError(f"'GradScaler' object has no attribute '_{name}'")
        return getattr(self._core.policy, name)

    _init_scale = property(lambda self: self._setting("init_scale"))
    _growth_factor = property(lambda self: self._setting("growth_factor"))
    _backoff_factor = property(lambda self: self._setting("backoff_factor"))
    _growth_interval = property(lambda self: self._setting("growth_interval"))

    def set_growth_factor(self, new_factor: float) -> None:
        self._core.set_policy(self._core.policy.replace(growth_factor=new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        self._core.set_policy(self._core.policy.replace(backoff_factor=new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        self._core.set_policy(self._core.policy.replace(growth_interval=new_interval))

    def _get_growth_tracker(self) -> int:
        return max(json.loads(self._core.state())["state"].get("growth_tracker", 0), 0) if self._enabled else 0

    def state_dict(self) -> dict[str, Any]:
        """Without ``policy``: torch's five keys. With one, or once another policy was set or loaded: ``"headroom"``,
        policy and state as JSON text. Raises between ``step()`` and ``update()``, when an overflow would be forgotten."""
        if not self._enabled:
            return {}
        self._update_if_due()
        try:
            saved = self._core.save()
        except Error as error:
            raise make(error.code, str(error).replace("save()", "state_dict()", 1)) from None
        if not self._follows_torch or not is_torchs_policy(self.policy):
            return {"headroom": saved}
        return {
            "scale": self.get_scale(),
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
            "_growth_tracker": self._get_growth_tracker(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes torch's keys or our own, with the policy that they contain. Raises, changing nothing, if a value is
        impossible."""
        if not self._enabled:
            return
        if len(state_dict) == 0:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        self._update_if_due()
        if "headroom" in state_dict:
            self._load(json.loads(state_dict["headroom"]))
            return
        self._load(with_torch_state(json.loads(self._core.state()), state_dict))

    def __getstate__(self) -> dict[str, Any]:
        self._update_if_due()
        if self._per_optimizer_states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        kept = {name: value for name, value in self.__dict__.items() if name not in self._made_anew}
        return kept | {"state": self._core.state(), "_on_alarm": None}  # which may be of a watch, or a lambda

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("state")
        self.__dict__.update(state)
        self._begin(_core.ScalePolicy("torch"))
        self._load(json.loads(saved))

    def _begin(self, policy: _core.ScalePolicy) -> None:
        raise NotImplementedError

    def _load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _update_if_due(self) -> None:
        raise NotImplementedError
