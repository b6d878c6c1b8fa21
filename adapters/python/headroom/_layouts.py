"""How frameworks write a scaler's state: dictionaries from and to ``ScaleState``.

A layout that does not contain the policy's settings is read with its framework's preset."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from headroom._core import ScalePolicy, ScaleState
from headroom._errors import Error, make

TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
MEGATRON_KEYS = ("scale", "growth_tracker", "hysteresis_tracker")
DEEPSPEED_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window")
KERAS_KEYS = ("dynamic_scale", "step_counter")


def read(layout: Mapping[str, Any], policy: Optional[ScalePolicy] = None) -> ScaleState:
    """The state that a dictionary of any layout describes. With ``policy``, the scale and counts of that
    dictionary under that policy, as far as they have a meaning there. Raises headroom.Error."""
    found = layout_of(layout)
    if found is None:
        raise make("bad state", f"Unknown scaler state; supported layouts: {', '.join(_READERS)}.")
    try:
        state = _READERS[found](layout)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        if isinstance(error, Error):
            raise make("bad state", str(error)) from None
        raise make("bad state", f"The saved state of the scaler is damaged: {error}.") from None
    return state if policy is None else under(state, policy)


def layout_of(layout: Mapping[str, Any]) -> Optional[str]:
    """``"torch"``, ``"megatron"``, ... or None."""
    if layout.get("format") == "headroom-scaler":
        return "json"
    if isinstance(layout.get("headroom"), str):
        return "headroom"
    for name, keys in (("torch", TORCH_KEYS), ("megatron", MEGATRON_KEYS), ("deepspeed", DEEPSPEED_KEYS),
                       ("keras", KERAS_KEYS)):
        if all(key in layout for key in keys):
            return name
    return None


def write(state: ScaleState, layout: str) -> dict[str, Any]:
    """The dictionary of a layout; raises headroom.Error if there is no such layout."""
    if layout not in WRITERS:
        raise make("invalid argument", f"There is no layout {layout!r}; use one of {', '.join(WRITERS)}.")
    return WRITERS[layout](state)


def pack(state: ScaleState) -> list[int]:
    """The numbers of a state, of which some need FP64, as integers of 32 bits, for arrays of JAX."""
    values = state.numbers.values()
    return list(struct.unpack(f"{2 * len(values)}i", struct.pack(f"{len(values)}d", *values)))


def unpack(policy: ScalePolicy, packed: Sequence[int]) -> ScaleState:
    """The state of a policy from ``pack()``. Raises headroom.Error if it is impossible."""
    state = ScaleState(policy)
    numbers = state.numbers
    if len(packed) != 2 * len(numbers):
        raise make("bad state", "The saved state of the scaler is that of another policy.")
    values = struct.unpack(f"{len(numbers)}d", struct.pack(f"{len(packed)}i", *packed))
    try:
        return state.replace(**{name: type(old)(new) for (name, old), new in zip(numbers.items(), values)})
    except (ValueError, OverflowError):  # NaN or inf in the place of an integer
        raise make("bad state", "The saved state of the scaler is damaged.") from None


def under(state: ScaleState, policy: ScalePolicy) -> ScaleState:
    """Scale and counts of a state under another policy; counts without a meaning there start again."""
    fresh, old = ScaleState(policy), state.numbers
    numbers = {name: old[name] for name in ("steps", "skipped", "skips_in_row")}
    numbers["scale"] = _allowed_scale(policy, state.scale)
    if policy.rule == "dynamic" and state.policy.rule == "dynamic":
        numbers["growth_tracker"] = min(max(old["growth_tracker"], fresh.numbers["growth_tracker"]),
                                        policy.growth_interval - 1)
        numbers["delay_left"] = min(old["delay_left"], policy.hysteresis)
        numbers["since_rescale"] = old["since_rescale"]
        numbers["overflows_since_rescale"] = old["overflows_since_rescale"]
    return fresh.replace(**numbers)


def _allowed_scale(policy: ScalePolicy, scale: float) -> float:
    """The nearest scale that the policy allows; with Headroom's rule the largest power of two up to it."""
    if policy.rule == "static":
        return scale
    if policy.rule == "headroom":
        scale = 2.0 ** (math.frexp(scale)[1] - 1)
    elif policy.stay_above_min and scale <= policy.min_scale:
        return policy.init_scale
    return min(max(scale, policy.min_scale), policy.max_scale)


def _number(value: Any) -> Any:
    """A Python number; Megatron's scale is a tensor with one element."""
    return value.item() if hasattr(value, "item") else value


def _state(policy: ScalePolicy, scale: Any, **numbers: Any) -> ScaleState:
    return ScaleState(policy).replace(
        scale=float(_number(scale)), **{name: int(_number(value)) for name, value in numbers.items()})


def _read_torch(layout: Mapping[str, Any]) -> ScaleState:
    interval = int(layout["growth_interval"])
    policy = ScalePolicy("torch").replace(
        growth_factor=float(layout["growth_factor"]), backoff_factor=float(layout["backoff_factor"]),
        growth_interval=interval)
    # torch leaves the count where it is when the interval is made shorter.
    return _state(policy, layout["scale"], growth_tracker=min(int(layout["_growth_tracker"]), interval - 1))


def _read_megatron(layout: Mapping[str, Any]) -> ScaleState:
    tracker, delay = int(_number(layout["growth_tracker"])), int(_number(layout["hysteresis_tracker"]))
    policy = ScalePolicy("megatron")
    policy = policy.replace(growth_interval=max(policy.growth_interval, tracker + 1),
                            hysteresis=max(policy.hysteresis, delay))
    # Megatron counts on below 1, where every overflow shrinks the scale.
    return _state(policy, layout["scale"], growth_tracker=tracker, delay_left=max(delay, 1))


def _read_deepspeed(layout: Mapping[str, Any]) -> ScaleState:
    window, steps = int(layout["scale_window"]), int(layout["cur_iter"])
    delay = int(layout.get("delayed_shift", 1))  # ZeRO-0 has none
    scale, factor = float(layout["cur_scale"]), float(layout.get("scale_factor", 2.0))
    if not factor > 1.0:
        raise make("bad state", f"The saved scale_factor is {factor:g}; it must be above 1.")
    policy = ScalePolicy("deepspeed").replace(
        growth_factor=factor, growth_interval=window, hysteresis=delay, backoff_factor=1.0 / factor,
        min_scale=min(float(layout.get("min_scale", 1.0)), scale), init_scale=scale,
        refill_on_clean=bool(layout.get("consecutive_hysteresis", False)))
    # Clean steps since the last overflow, less the one that DeepSpeed does not count; -1 right after it.
    stable = steps - int(layout["last_overflow_iter"]) - 2
    return _state(policy, scale, steps=steps, growth_tracker=stable % window if stable > 0 else stable,
                  delay_left=int(layout.get("cur_hysteresis", delay)))


def _read_keras(layout: Mapping[str, Any]) -> ScaleState:
    tracker = int(_number(layout["step_counter"]))
    policy = ScalePolicy("keras")
    policy = policy.replace(growth_interval=max(policy.growth_interval, tracker + 1))
    return _state(policy, layout["dynamic_scale"], growth_tracker=tracker)


def clean_steps(state: ScaleState) -> int:
    """Since the last overflow or growth, as torch's rule counts them."""
    return max(state.numbers.get("growth_tracker", 0), 0)


def _setting(state: ScaleState, name: str, otherwise: Any) -> Any:
    return getattr(state.policy, name, otherwise)


def _write_torch(state: ScaleState) -> dict[str, Any]:
    return {"scale": state.scale, "growth_factor": _setting(state, "growth_factor", 2.0),
            "backoff_factor": _setting(state, "backoff_factor", 0.5),
            "growth_interval": _setting(state, "growth_interval", 2000), "_growth_tracker": clean_steps(state)}


def _write_megatron(state: ScaleState) -> dict[str, Any]:
    return {"scale": state.scale, "growth_tracker": clean_steps(state),
            "hysteresis_tracker": state.numbers.get("delay_left", 1)}


def _write_deepspeed(state: ScaleState) -> dict[str, Any]:
    hysteresis = _setting(state, "hysteresis", 1)
    return {"cur_scale": state.scale, "cur_iter": state.steps,
            "last_overflow_iter": state.steps - 2 - state.numbers.get("growth_tracker", -1),
            "scale_factor": _setting(state, "growth_factor", 2.0),
            "scale_window": _setting(state, "growth_interval", 1000),
            "min_scale": _setting(state, "min_scale", 1.0), "delayed_shift": hysteresis,
            "cur_hysteresis": state.numbers.get("delay_left", 1),
            "consecutive_hysteresis": _setting(state, "refill_on_clean", False)}


def _write_keras(state: ScaleState) -> dict[str, Any]:
    return {"dynamic_scale": state.scale, "step_counter": clean_steps(state)}


_READERS: dict[str, Callable[[Mapping[str, Any]], ScaleState]] = {
    "json": lambda layout: ScaleState.load(json.dumps(layout)),
    "headroom": lambda layout: ScaleState.load(layout["headroom"]),
    "torch": _read_torch,
    "megatron": _read_megatron,
    "deepspeed": _read_deepspeed,
    "keras": _read_keras,
}

# Accelerate's scaler.pt is torch's state dict; fairseq2 and Lightning keep it under a name.
WRITERS: dict[str, Callable[[ScaleState], dict[str, Any]]] = {
    "torch": _write_torch,
    "accelerate": _write_torch,
    "lightning": lambda state: {"MixedPrecision": _write_torch(state)},
    "fairseq2": lambda state: {"grad_scaler": _write_torch(state)},
    "megatron": _write_megatron,
    "deepspeed": _write_deepspeed,
    "keras": _write_keras,
    "headroom": lambda state: {"headroom": state.save()},
    "json": lambda state: json.loads(state.save()),
}
