"""torch.amp.GradScaler, with Headroom's one-pass kernel inside."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from headroom import _core
from headroom.torch._memory import View, stream_of, view_of
from headroom.torch._optim import FusedOptimizer


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
    found: dict[torch.device, torch.Tensor]
    stats: Optional[_core.GradStats] = None  # of the scaled gradients
    culprit: str = ""


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

    In-place unscaling for torch's own optimizers is left to torch's kernel, which is fast and never
    waits; BF16 gradients on CUDA, which it does not take, go through Headroom's.
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
        applied = not sum(float(found) for found in last.found.values())
        scale = float(last.scale)
        norm = None if last.stats is None else last.stats.norm / scale
        return Report(applied, scale, norm, "" if applied else last.culprit)

    @property
    def last_step_applied(self) -> bool:
        """Whether the last step ran; a disabled scaler runs every one. Waits for a CUDA device."""
        return not self._enabled or self.report().applied

    def _views(self, optimizer: torch.optim.Optimizer) -> tuple[list[View], list[torch.Tensor]]:
        """The gradients that the core can read, and their parameters."""
        views, owners = [], []
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    view = view_of(grad._values() if grad.is_sparse else grad)
                    if view is not None:
                        views.append(view)
                        owners.append(param)
        return views, owners

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
        ours: dict[torch.device, list[View]] = {}
        theirs = []
        for group in optimizer.param_groups if torch.cuda.is_initialized() else ():
            for param in group["params"]:
                grad = getattr(param, "grad", None)
                bf16 = grad is not None and grad.is_cuda and grad.dtype is torch.bfloat16
                view = view_of(grad) if bf16 else None
                if view is None:
                    theirs.append(param)
                else:
                    ours.setdefault(grad.device, []).append(view)
        rest = types.SimpleNamespace(param_groups=[{"params": theirs}]) if ours else optimizer
        found = super()._unscale_grads_(rest, inv_scale, found_inf, True)
        for device, views in ours.items():
            if device not in found:
                found[device] = found_inf.to(device=device, copy=True)
            if not _core.unscale_(views, float(inv_scale), stream=stream_of(device)).ok:
                found[device].fill_(1.0)
        if self._scale is not None:
            self._seen[id(optimizer)] = _Seen(self._scale.clone(), found)
        return found

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """For optimizers that unscale by themselves. Of ours, what is measured serves both."""
        if not isinstance(optimizer, FusedOptimizer) or self._scale is None:
            return super()._check_inf_per_device(optimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.coalesce()  # the sum of duplicates may overflow
        views, owners = self._views(optimizer)
        if not views or len(views) != sum(
            param.grad is not None for group in optimizer.param_groups for param in group["params"]
        ):
            return super()._check_inf_per_device(optimizer)
        device = owners[0].grad.device
        stats = _core.measure(views, stream=stream_of(device))
        found = {device: torch.full((), float(not stats.finite), device=device)}
        culprit = self._culprit(stats, optimizer, owners)
        self._seen[id(optimizer)] = _Seen(self._scale.clone(), found, stats, culprit)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        optimizer.grads_measured = stats
        return found

    def _find_culprit(self, optimizer: torch.optim.Optimizer) -> None:
        views, owners = self._views(optimizer)
        seen = self._seen.get(id(optimizer))
        if seen is not None and len({view[3] for view in views}) == 1:
            stats = _core.measure(views, stream=stream_of(owners[0].grad.device))
            seen.culprit = self._culprit(stats, optimizer, owners)

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Optional[float]:
        # As torch's, which waits for the flags here.
        if not sum(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        self._find_culprit(optimizer)
        return None

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Optional[float]:
        result = super().step(optimizer, *args, **kwargs)
        self._last = self._seen.get(id(optimizer))
        if self._last is not None and not self._last.culprit:
            found = self._last.found.values()  # on CUDA, asking a fused optimizer's would wait
            if all(flag.is_cpu for flag in found) and any(map(float, found)):
                self._find_culprit(optimizer)
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
