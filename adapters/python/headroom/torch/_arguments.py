"""Checks and converts the arguments of GradScaler and of the fused optimizers."""

from __future__ import annotations

import math
from typing import Any, Union

import torch

from headroom import _core
from headroom._errors import Error, make

_TORCH_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def check_device(device: Any) -> None:
    if isinstance(device, str) and device.partition(":")[0] in _core.presets():
        raise make("invalid argument", f"{device!r} is a policy, not a device: GradScaler(\"cuda\", policy={device!r}).")
    try:
        torch.device(device)
    except RuntimeError as error:
        raise make("invalid argument", f"The device {device!r} is unknown: {error}") from None


def policy_of(
    policy: Union[_core.ScalePolicy, str, None], given: dict[str, Any], enabled: bool
) -> _core.ScalePolicy:
    if policy is not None:
        changed = [name for name, value in given.items() if value != _TORCH_DEFAULTS[name]]
        if changed:
            rule = policy.partition(":")[0] if isinstance(policy, str) else "torch"
            raise make("invalid argument", f"{changed[0]} is given beside a policy; make it part of the policy: "
                       f"\"{rule}:{changed[0]}={given[changed[0]]}\".")
        return _core.ScalePolicy(policy) if isinstance(policy, str) else policy
    if not enabled:
        return _core.ScalePolicy("torch")
    if given["growth_factor"] <= 1.0:
        raise AssertionError("The growth factor must be > 1.0.")
    if given["backoff_factor"] >= 1.0:
        raise AssertionError("The backoff factor must be < 1.0.")
    return _core.ScalePolicy("torch").replace(**given)


def is_torchs_policy(policy: _core.ScalePolicy) -> bool:
    """Whether the five keys of torch's state dict say all about it."""
    names = tuple(_TORCH_DEFAULTS)
    return policy.rule == "dynamic" and str(policy) == str(
        _core.ScalePolicy("torch").replace(**{name: getattr(policy, name) for name in names}))


# Arguments of torch's optimizers. True: accepted and ignored, because it does not change results. False: only
# a false value is accepted.
_TORCHS = {"fused": True, "foreach": True, "capturable": True, "amsgrad": False, "maximize": False,
           "differentiable": False}


def check_torch_arguments(optimizer: str, torchs: dict[str, Any], max_norm: Any) -> None:
    """Raises for arguments that the fused optimizers do not have."""
    for name, value in torchs.items():  # for programs written for torch's optimizers
        if name not in _TORCHS:
            raise TypeError(f"{optimizer} got an unexpected keyword argument {name!r}")
        if value and not _TORCHS[name]:
            raise not_ours(name)
    if not isinstance(max_norm, (int, float)) or not 0.0 <= max_norm < math.inf:
        raise make("invalid argument", f"max_norm is {max_norm!r}; it has to be a number above 0, or 0 "
                   "for no clipping.")


def not_ours(name: str) -> Error:
    return make("unsupported", f"{name} is not part of headroom's fused optimizers; use torch's for it.")


def plain_option(option: Any) -> Any:
    """Copies an option to numbers: it may be a tensor, or a list that is changed in place."""
    if type(option) is float or isinstance(option, bool):
        return option
    return tuple(map(float, option)) if isinstance(option, (tuple, list)) else float(option)


def with_torch_state(state: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A state of the core with the settings and numbers of a state dict of torch's scaler."""
    if state["policy"]["rule"] != "dynamic":
        raise make("bad state", "This state dict is that of a torch.amp.GradScaler; load it into a scaler "
                   "without policy, or with one of torch's rule (policy=\"torch\").")
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        state["policy"][name] = given[name]
    if not math.isfinite(given["scale"]):
        raise make("invalid argument", f"The saved scale is {given['scale']}.")
    numbers = state["state"]
    numbers["scale"] = numbers["pending"] = float(given["scale"])
    # torch leaves the count where it is when the interval is made shorter.
    numbers["growth_tracker"] = min(int(given["_growth_tracker"]), int(given["growth_interval"]) - 1)
    return state
