"""torch.amp.GradScaler with Headroom's one-pass kernels."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch.amp.grad_scaler import OptState, _MultiDeviceReplicator
from torch.utils.weak import WeakTensorKeyDictionary

from headroom import _core
from headroom.torch._memory import View, stream_of, view_of
from headroom.torch._optim import FusedOptimizer


@dataclass
class Report:
    """The outcome of the last step."""

    applied: bool
    scale: float  #: the scale of the loss that the gradients come from
    grad_norm: Optional[float]  #: norm of the unscaled gradients; None if not known
    culprit: str  #: the first tensor with inf or nan: "layer.weight: 3 inf, 0 nan"; empty if none or not known

    def __str__(self) -> str:
        if self.applied:
            norm = "" if self.grad_norm is None else f": norm {self.grad_norm:g}"
            return f"applied at scale {self.scale:g}{norm}"
        return f"skipped at scale {self.scale:g}: {self.culprit or 'inf or nan in the gradients'}"


@dataclass
class _Seen:
    """The inf and nan checks of the gradients of one optimizer in this round."""

    scale: Optional[torch.Tensor]  # a copy that update() does not change; None: `fused` has it
    found: dict[torch.device, torch.Tensor]
    fused: Optional[weakref.ref[FusedOptimizer]] = None  # the optimizer, which has a report,
    walked: int = 0  # as long as its number of steps is this
    culprit: str = ""

    def knower(self) -> Optional[FusedOptimizer]:
        """`fused`, if it still exists and has made no other step since."""
        fused = None if self.fused is None else self.fused()
        return fused if fused is not None and fused.walked == self.walked else None


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``: the same constructor, methods, exceptions, state dict and pickles,
    except that FP16 gradients do not raise.

    In addition: FP16 and BF16 gradients are supported; ``last_step_applied`` and ``report()`` return whether
    the last step ran and which parameter had inf or nan. With ``headroom.torch.AdamW`` and ``SGD`` a step,
    including clipping, is two passes over memory.

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

    For torch's own optimizers gradients are unscaled in place by torch's kernel, which is fast and never
    waits. It does not support BF16 gradients on CUDA; Headroom's kernel unscales those.
    """

    __signature__ = inspect.signature(torch.amp.GradScaler)

    def __new__(cls, *args: Any, **kwargs: Any) -> GradScaler:
        # Not in __init__: torch's __init__ warns its caller, which must be the user's code.
        self = super().__new__(cls)
        self._forget()
        return self

    def _forget(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._last: Optional[_Seen] = None
        self._stepped = False
        self._names = WeakTensorKeyDictionary()
        self._flags: weakref.WeakKeyDictionary[FusedOptimizer, torch.Tensor]
        self._flags = weakref.WeakKeyDictionary()

    def name_parameters(self, module: torch.nn.Module) -> None:
        """Makes reports use the names of the module's parameters."""
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    def report(self) -> Report:
        """The outcome of the last step. Waits for a CUDA device."""
        if self._last is None and self._stepped:
            raise RuntimeError("report() knows nothing of the last step: the scaler is disabled, or the "
                               "optimizer took care of the scale itself.")
        if self._last is None:
            raise RuntimeError("report() was called before any step(); step first.")
        last = self._last
        if last.fused is not None:
            fused = last.knower()
            if fused is None:
                raise RuntimeError("report() cannot tell: the optimizer was stepped by others since, or "
                                   "is gone.")
            told = fused.report()
            culprit = self._culprit(told.stats, fused, fused.listed) or told.culprit
            scale = told.scale if last.scale is None else float(last.scale)
            return Report(told.applied, scale, told.grad_norm, "" if told.applied else culprit)
        applied = not sum(float(found) for found in last.found.values())
        return Report(applied, float(last.scale), None, "" if applied else last.culprit)

    @property
    def last_step_applied(self) -> bool:
        """Whether the last step ran; a disabled scaler runs every step. Waits for a CUDA device."""
        last = self._last
        if last is not None and last.fused is not None and last.knower() is None:
            return not any(map(float, last.found.values()))
        return not self._enabled or self.report().applied

    def _views(self, optimizer: torch.optim.Optimizer) -> tuple[list[View], list[torch.Tensor]]:
        """Views of the gradients that the core can read, and their parameters."""
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
        # Like torch's method, but accesses each gradient once and unscales BF16 on CUDA with Headroom's kernel.
        lists: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                try:
                    grad = param.grad
                except AttributeError:
                    told = f"expected param to be torch.Tensor, got {type(param).__name__}"
                    raise AssertionError(told) from None
                if grad is None:
                    continue
                dtype = grad.dtype
                if grad.is_sparse:
                    if dtype is torch.float16:  # the sum of duplicates may overflow
                        param.grad = grad = grad.coalesce()
                    grad = grad._values()
                key = (grad.device, dtype)
                if key in lists:
                    lists[key].append(grad)
                else:
                    lists[key] = [grad]
        inverses, founds = _MultiDeviceReplicator(inv_scale), _MultiDeviceReplicator(found_inf)
        with torch.no_grad():
            for (device, dtype), grads in lists.items():
                found = founds.get(device)
                views = None
                if dtype is torch.bfloat16 and device.type == "cuda":
                    views = [view_of(grad) for grad in grads]
                if views is None or None in views:
                    inverse = inverses.get(device)
                    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
                    if dtype is torch.float16:  # with a scale below 1 unscaling may overflow: check again
                        torch._amp_foreach_non_finite_check_and_unscale_(
                            grads, found, torch.ones_like(inverse))
                elif not _core.unscale_(views, float(inv_scale), stream=stream_of(device)).ok:
                    found.fill_(1.0)
        found_by_device = founds._per_device_tensors
        if self._scale is not None:
            self._seen[id(optimizer)] = _Seen(self._scale.clone(), found_by_device)
        return found_by_device

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
        # Like torch's method, which waits for the flags here too.
        if not sum(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        self._find_culprit(optimizer)
        return None

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Optional[float]:
        fused = isinstance(optimizer, FusedOptimizer) and self._enabled
        if fused and not args and not kwargs and self._can_walk(optimizer):
            return self._step_fused(optimizer)
        if fused and optimizer.listed:
            result = self._step_told(optimizer, *args, **kwargs)
        else:
            result = super().step(optimizer, *args, **kwargs)
        self._stepped = True
        self._last = self._seen.get(id(optimizer))
        if self._last is not None and fused:
            self._last.fused, self._last.walked = weakref.ref(optimizer), optimizer.walked
        elif self._last is not None and not self._last.culprit:
            found = self._last.found.values()  # on CUDA reading the flags of a fused optimizer would wait
            if all(flag.is_cpu for flag in found) and any(map(float, found)):
                self._find_culprit(optimizer)
        return result

    def _step_told(self, optimizer: FusedOptimizer, *args: Any, **kwargs: Any) -> Optional[float]:
        """Torch's step(). A step that the optimizer itself skips, because of nan introduced after unscale_(),
        counts as skipped too."""
        told = torch.zeros(1, device=optimizer.listed[0].device)
        optimizer.skipped_there = told
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            del optimizer.skipped_there
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.copy_(torch.maximum(found, told.to(found.device, non_blocking=True).view_as(found)))
        return result

    def _can_walk(self, optimizer: FusedOptimizer) -> bool:
        """Whether the optimizer can check for inf and nan in its own pass. If not, torch's step() handles the
        case or raises."""
        state = self._per_optimizer_states[id(optimizer)]
        return (
            self._scale is not None
            and state["stage"] is OptState.READY
            and optimizer.has_gradients_on(self._scale.device)
            and getattr(optimizer, "grad_scale", None) is None
        )

    def _step_fused(self, optimizer: FusedOptimizer) -> None:
        state = self._per_optimizer_states[id(optimizer)]
        found = self._flags.get(optimizer)  # receives 1 if the step is skipped
        if found is None:
            found = self._flags[optimizer] = torch.empty_like(self._scale, dtype=torch.float32)
        seen = _Seen(None, {found.device: found}, weakref.ref(optimizer))
        walked = optimizer.walked
        optimizer.grad_scale, optimizer.skipped_there = self._scale, found
        try:
            optimizer.step()
        except BaseException:
            state["found_inf_per_device"] = {found.device: found.zero_()}  # so that update() can follow
            raise
        finally:
            del optimizer.grad_scale, optimizer.skipped_there
        state["stage"] = OptState.STEPPED
        state["found_inf_per_device"] = seen.found
        seen.walked = optimizer.walked
        self._stepped = True
        if optimizer.walked == walked:  # a hook or a subclass prevented the step
            found.zero_()
            self._last = None
        else:
            self._seen[id(optimizer)] = self._last = seen

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self._seen = {}

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for own in ("_seen", "_last", "_names", "_flags", "_stepped"):
            state.pop(own)
        return state


GradScaler.step.__doc__ = torch.amp.GradScaler.step.__doc__
GradScaler.update.__doc__ = torch.amp.GradScaler.update.__doc__
