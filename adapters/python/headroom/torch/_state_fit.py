"""state_fit: whether a compact state holds the moments that an optimizer has now."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch

from headroom._errors import make
from headroom.torch._memory import local

_GROUP = 32  # moments that share an exponent in "byte"
_FIRST = ("exp_avg", "momentum_buffer")
_SHARE = 0.01  # of a tensor, that may be too small


@dataclass(frozen=True)
class MomentFit:
    """How many moments of one parameter a state does not hold."""

    name: str  # "embed.weight/exp_avg_sq"
    count: int
    too_small: int  # first moments become 0 or the smallest number at random, second ones are raised to it
    too_large: int  # limited to the largest number; inf and NaN too

    @property
    def fits(self) -> bool:
        return self.too_large == 0 and self.too_small <= _SHARE * self.count

    def __str__(self) -> str:
        effect = "raised, so these weights take smaller steps" if self.name.endswith("_sq") else "rounded to 0 or one bit"
        large = f", {self.too_large} too large" if self.too_large else ""
        return f"{self.name}: {self.too_small / max(self.count, 1):.2%} too small ({effect}){large}"


@dataclass(frozen=True)
class StateFit:
    """What ``state_fit()`` has found. ``print()`` shows the verdict and the moments that do not fit."""

    state: str
    moments: list[MomentFit]

    @property
    def fits(self) -> bool:
        return all(moment.fits for moment in self.moments)

    def __str__(self) -> str:
        worst = max(self.moments, key=lambda moment: moment.too_small / max(moment.count, 1))
        if self.fits:
            return f"State {self.state!r} holds these moments. The worst is {worst}."
        bad = [moment for moment in self.moments if not moment.fits]
        lines = "".join(f"\n  {moment}" for moment in bad[:10])
        return f"State {self.state!r} does not hold {len(bad)} of {len(self.moments)} tensors of moments:{lines}"


def state_fit(optimizer: torch.optim.Optimizer, state: Optional[str] = None) -> StateFit:
    """Counts the moments that state "half" or "byte" cannot hold, and warns (RuntimeWarning) if they are more than 1 % of a
    tensor or too large. Call it after some hundred steps of any Adam, Lion or SGD with momentum: of torch with its FP32
    state before a change to "byte", or of Headroom. By default ``state`` is that of the optimizer, and else "byte".

    Of state that is "byte" already it counts what is stored as the smallest number. Reads all moments once; DTensors
    count this process's part.
    """
    own = getattr(optimizer, "_precision", (None, None, None, "full"))[3]
    state = state or ("byte" if own == "full" else own)
    if state not in ("half", "byte"):
        raise make("invalid argument", f"State {state!r} is none that rounds moments; it can be half or byte.")
    found = []
    for name, first, second in _moments(optimizer):
        for label, values in zip(name, (first, second)):
            if values is not None:
                small, large = _outside(values, state, None if values is first else first)
                found.append(MomentFit(label, values.numel(), small, large))
    if not found:
        raise make("wrong order", "The optimizer has no moments yet; take some steps first.")
    result = StateFit(state, found)
    if not result.fits:
        warnings.warn(str(result), RuntimeWarning, stacklevel=2)
    return result


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[list[str], torch.Tensor, Optional[torch.Tensor]]]:
    """Names, first and second moment of each parameter, in the order of its memory."""
    saved = optimizer.state
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            name = group["param_names"][i] if "param_names" in group else f"param_groups[{g}].params[{i}]"
            key = next((key for key in _FIRST if saved.get(param, {}).get(key) is not None), None)
            if key is not None:
                strides = local(param).stride()
                order = [d for _, d in sorted((-stride, d) for d, stride in enumerate(strides))]
                tensors = [saved[param].get(each) for each in (key, "exp_avg_sq")]
                flat = [None if each is None else local(each.detach()).float().permute(order).flatten() for each in tensors]
                assert flat[0] is not None
                yield [f"{name}/{key}", f"{name}/exp_avg_sq"], flat[0], flat[1]


def _outside(values: torch.Tensor, state: str, first: Optional[torch.Tensor]) -> tuple[int, int]:
    """How many moments are too small and too large. ``first`` is given for second moments: where it is 0 the weight does
    not move, whatever the second moment is. docs/state.md has the formats."""
    size = values.abs().nan_to_num(nan=torch.inf)
    if state == "half":
        smallest, largest = torch.tensor(2.0**-133), torch.finfo(torch.bfloat16).max
    else:
        groups = torch.nn.functional.pad(size, (0, -size.numel() % _GROUP)).view(-1, _GROUP)
        # The exponent of a group: of the largest, or one more if that can be rounded up.
        top = groups.amax(1).clamp(max=2.0**126).view(torch.int32) + 0xFFFFF >> 23
        below = 17 if first is None else 31
        exponent = top.clamp(min=below + 1) - below
        smallest = (exponent << 23).view(torch.float32).repeat_interleave(_GROUP)[: size.numel()]
        largest = 2.0**126
    small = (size <= smallest.to(size.device)) & ((size if first is None else first) != 0)
    return int(small.sum()), int((size >= largest).sum())
