"""torch.amp.GradScaler, with Headroom's one-pass kernel inside."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from headroom import _core
from headroom.torch._memory import CODES, View, stream_of, view_of

_CPU = torch.device("cpu")


@dataclass
class Report:
    """What the last step did."""

    applied: bool
    scale: float  #: the scale that the gradients were made with
    grad_norm: Optional[float]  #: of the unscaled gradients; None where it is not known
    culprit: str  #: the first bad tensor: "layer.weight: 3 inf, 0 nan"; empty if none or not known

    def __str__(self) -> str:
        if self.applied:
            norm = "" if self.grad_norm is None else f": norm {self.grad_norm:g}"
            return f"applied at scale {self.scale:g}{norm}"
        return f"skipped at scale {self.scale:g}: {self.culprit or 'inf or nan in the gradients'}"


@dataclass
class _Seen:
    """What was found in the gradients of one optimizer in this round."""

    scale: torch.Tensor  # a copy, which no update() moves
    stats: Optional[_core.GradStats] = None  # of all gradients, scaled; None if torch's kernel ran
    culprit: str = ""
    found: list[torch.Tensor] = field(default_factory=list)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``: the same constructor, methods, exceptions, state dict and pickles.

    Beyond it: FP16 and BF16 gradients are accepted; ``last_step_applied`` and ``report()`` say
    whether the last step ran and which parameter was at fault. With ``headroom.torch.AdamW`` and
    ``SGD`` the step is two passes over memory, clipping included.

    >>> import torch, headroom.torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> scaler = headroom.torch.GradScaler("cpu")
    >>> scaler.name_parameters(layer)
    >>> scaler.scale(layer(torch.tensor([[1.0, float("inf")]])).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> print(scaler.report(), "->", scaler.get_scale())
    skipped at scale 65536: weight: 1 inf, 0 nan -> 32768.0

    Gradients on the CPU, and BF16 ones on CUDA, go through Headroom's kernels. The rest goes through
    torch's own: other CUDA gradients (for which torch's never waits), other devices, gradients that
    are not dense in memory, and tensor subclasses.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forget()

    def _forget(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._last: Optional[_Seen] = None
        self._names = WeakTensorKeyDictionary()

    def name_parameters(self, module: torch.nn.Module) -> None:
        """From now on reports call the module's parameters by their names."""
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    def report(self) -> Report:
        """What the last step did. Waits for a CUDA device."""
        if self._last is None:
            raise RuntimeError("report() was called before any step(); step first.")
        last = self._last
        applied = not sum(float(found) for found in last.found)
        scale = float(last.scale)
        norm = None if last.stats is None else last.stats.norm / scale
        return Report(applied, scale, norm, "" if applied else last.culprit)

    @property
    def last_step_applied(self) -> bool:
        """Whether the last step ran; a disabled scaler runs every one. Waits for a CUDA device."""
        return not self._enabled or self.report().applied

    def _culprit(
        self, stats: _core.GradStats, optimizer: torch.optim.Optimizer, owners: list[torch.Tensor]
    ) -> str:
        if stats.culprit < 0:
            return ""
        parameter = owners[stats.culprit]
        name = self._names.get(parameter)
        for g, group in enumerate(optimizer.param_groups if name is None else ()):
            for i, member in enumerate(group["params"]):
                if member is parameter:
                    name = f"param_groups[{g}].params[{i}]"
        return f"{name}: {stats.culprit_inf} inf, {stats.culprit_nan} nan"

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        here: list[View] = []  # on the CPU
        there: dict[torch.device, list[View]] = {}  # BF16 on CUDA
        owners: list[torch.Tensor] = []  # of those, in this order
        theirs: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        on_host = inv_scale.is_cpu
        inverse = float(inv_scale) if on_host else 0.0
        plain = not on_host or 0.0 < inverse < math.inf
        codes, tensor, strided = CODES, torch.Tensor, torch.strided
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if not isinstance(param, tensor):
                        raise AssertionError(
                            f"expected param to be torch.Tensor, got {type(param).__name__}"
                        )
                    grad = param.grad
                    if grad is None:
                        continue
                    code = codes.get(grad.dtype)
                    if code is not None and type(grad) is tensor and grad.layout is strided:
                        if plain and grad.is_cpu and grad.is_contiguous():  # nearly always
                            here.append((grad.data_ptr(), code, grad.numel(), -1))
                            owners.append(param)
                            continue
                    if grad.is_sparse:
                        if grad.dtype is torch.float16:  # the sum of duplicates may overflow
                            grad = param.grad = grad.coalesce()
                        grad = grad._values()
                    ours = plain and (grad.is_cpu or grad.dtype is torch.bfloat16)
                    view = view_of(grad) if ours else None
                    if view is None:
                        theirs.setdefault((grad.device, grad.dtype), []).append(grad)
                    elif view[3] < 0:
                        here.append(view)
                        owners.append(param)
                    else:
                        there.setdefault(grad.device, []).append(view)
            lists = {_CPU: here, **there} if here else there
            devices = dict.fromkeys([*lists, *(device for device, _ in theirs)])
            found = {
                device: found_inf.to(device=device, non_blocking=True, copy=True)
                for device in devices
            }
            scale = 1.0 / inv_scale if self._scale is None else self._scale.clone()
            seen = _Seen(scale, found=list(found.values()))
            for device, views in lists.items():
                factor = inverse if on_host else float(inv_scale)
                stats, ok = self._run(views, factor, stream_of(device))
                if not ok:
                    found[device].fill_(1.0)
                if views is here:
                    seen.culprit = self._culprit(stats, optimizer, owners)
                if len(lists) == 1 and not theirs:
                    seen.stats = stats
            for (device, _), grads in theirs.items():
                torch._amp_foreach_non_finite_check_and_unscale_(
                    grads, found[device], inv_scale.to(device=device, non_blocking=True)
                )
        self._seen[id(optimizer)] = seen
        return found

    @staticmethod
    def _run(views: list[View], inverse: float, stream: int) -> tuple[_core.GradStats, bool]:
        if inverse == 1.0:  # a check alone
            stats = _core.measure(views, stream=stream)
            return stats, stats.finite
        result = _core.unscale_(views, inverse, stream=stream)
        return result.before, result.ok

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        found = super()._check_inf_per_device(optimizer)
        if hasattr(optimizer, "grads_measured"):  # one of ours, which then need not read them too
            optimizer.grads_measured = self._seen[id(optimizer)].stats
        return found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Optional[float]:
        result = super().step(optimizer, *args, **kwargs)
        self._last = self._seen.get(id(optimizer))
        return result

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self._seen = {}

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for own in ("_seen", "_last", "_names"):
            state.pop(own)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


GradScaler.step.__doc__ = torch.amp.GradScaler.step.__doc__
GradScaler.update.__doc__ = torch.amp.GradScaler.update.__doc__
