"""Torch optimizers that unscale, clip and update in one pass over memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from headroom import _core
from headroom._errors import Error, make
from headroom.torch._arguments import check_torch_arguments, not_ours, plain_option
from headroom.torch._binding import Call, Names
from headroom.torch._memory import (
    View,
    all_zero,
    check_whole,
    increment_versions,
    keep_eager,
    like,
    local,
    local_grad,
    local_of,
    places,
    stream_of,
    torch_memory,
    view_of,
)
from headroom.torch._ranks import is_sharded
from headroom.torch._state import TorchState


class FusedOptimizer(TorchState):
    """The base of AdamW, SGD and Lion.

    FP32 parameters are updated in place; FP16 and BF16 ones have FP32 masters inside, unless
    ``master_weights`` is False. If a weight is written to or loaded, its master is updated from it. Writes that
    torch's version counter does not show, through ``.data`` or NumPy, are found by samples; those of few elements of
    large tensors need ``refresh_masters()``. State is in torch's memory, and allocated by the first step. Under a
    GradScaler (Headroom's or torch's) gradients are unscaled in the pass that updates, and are not modified.
    ``max_norm`` clips their norm, over all groups, in the same pass; step() without a scaler then skips if there
    is inf or nan. With ``state`` "half" or "byte", masters and moments are kept in 16 or 8 bits (docs/state.md).
    """

    _kind: Any
    _option_names: tuple[str, ...]
    _buffers: tuple[str, ...]  # the core's state tensors by torch's names
    _step_supports_amp_scaling = True  # GradScaler.step() then sets grad_scale and found_inf

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        max_norm: float,
        precision: tuple[bool, bool, int, str],
        torchs: dict[str, Any],
    ) -> None:
        check_torch_arguments(type(self).__name__, torchs, max_norm)
        self.max_norm = max_norm
        self._precision = precision
        self._start()
        super().__init__(params, defaults)

    def _start(self) -> None:
        self._core = self._kind(*self._precision, torch_memory)
        self._options: list[dict[str, Any]] = []
        self._params: list[torch.Tensor] = []
        self._device: Optional[torch.device] = None  # of all parameters
        self._sharded = False  # this process has parts of parameters only
        self._counted: Optional[list[bool]] = None
        self._labels: list[str] = []
        # Memory of weights that have masters, so that after .data = other no new weight has the same address, and
        # compact masters, whose upper bits are in it, can still be read.
        self._held: list[torch.Tensor] = []
        self._layouts: list[tuple[Any, Any]] = []  # shapes and strides, which are the order of the core's memory
        self._places = places()
        self._written: list[int] = []  # parameters that others have written to
        self._prepared = False  # the core has memory for the state of all parameters
        self._settled = False  # the core's views are up to date
        self._weights_moved = False  # since the core's views were made
        self._changes = 0  # steps, loads and groups
        self._stepped: list[int] = []  # parameters with a gradient
        self._scaler: Optional[_core.GradScaler] = None  # measures, decides and applies without ours
        self._call: Optional[Call] = None  # of our scaler, while its step runs
        self._names_revision = -1
        self._unusable: Optional[Error] = None  # why the parameters could not be used when a round ended
        refresh = weakref.WeakMethod(self._refreshed)
        self._core.set_on_refresh(lambda: (refresh() or (lambda: False))())
        self._start_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._add_to_core(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _add_to_core(self, group: dict[str, Any]) -> None:
        g, triples = len(self._options), []
        for i, param in enumerate(group["params"]):
            label = f"param_groups[{g}].params[{i}]"
            view = view_of(local_of(param, label))
            if view is None:
                raise make("unsupported", f"{label} is a {type(param).__name__} of {param.dtype} on "
                           f"{param.device}; it has to be a dense FP16, BF16 or FP32 tensor, or a DTensor of such, on "
                           "the CPU or a CUDA device.")
            triples.append((label, view, None))
        if len({param.device for param in [*self._params, *group["params"]]}) > 1:
            raise make("unsupported", "The parameters are on several devices; give each device an "
                       "optimizer of its own, under one scaler.")
        options = self._options_of(group)
        if group["params"]:
            self._device = group["params"][0].device
        if self._params:
            self._follow()  # the core drops gradients that may have been freed
        self._core.add_group(triples, options, self._stream(group["params"]))
        self._options.append(options)
        self._labels += [label for label, _, _ in triples]
        self._params += group["params"]
        self._layouts += [(param.shape, param.stride()) for param in map(local, group["params"])]
        self._sharded = self._sharded or any(map(is_sharded, group["params"]))
        self._held += self._with_masters(group["params"])
        self._look()
        self._prepared = False
        self._changes += 1

    def _options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                raise not_ours(name)
        try:
            options = {name: plain_option(group[name]) for name in self._option_names}
        except KeyError as missing:
            raise make("bad state", f"A parameter group has no {missing}; it comes from another kind "
                       "of optimizer.") from None
        return options

    @staticmethod
    def _stream(params: list[torch.Tensor]) -> int:
        return stream_of(params[0].device) if params else 0

    def core_for(self, names: Names, counted: Optional[list[bool]]) -> _core.FusedOptimizer:
        """What our scaler steps. Reports use these names. ``counted``: which gradients this process counts in the norm,
        if several decide together."""
        if self._unusable is not None:
            raise self._unusable
        if not self._prepared:
            self._follow_groups()
        if counted is not self._counted:
            self._counted, self._settled = counted, False
        if names.revision != self._names_revision:
            self._names_revision = names.revision
            self._labels = names.of_all(self)
            self._settled = False
        if not self._prepared or self._has_moved():
            self._prepare()
        else:
            self._follow_state()
        return self._core

    def step_under(self, call: Call) -> Any:
        """A step under our scaler. It goes through step(), for the sake of hooks and of those who patched it."""
        self._call = call
        try:
            call.run(self)
            return call.result
        finally:
            self._call = None

    @property
    def device(self) -> Optional[torch.device]:
        """That of the parameters; None without any."""
        return self._params[0].device if self._params else None

    def _bind(self) -> None:
        self._follow_groups()
        self._prepare()

    def _prepare(self) -> None:
        """Shows the core memory and options as they are now, and gives it memory for state that it has none for."""
        self._show()
        self._core.allocate(self._stream(self._params))
        self._prepared = True

    def _refreshed(self) -> bool:
        """The core calls this before it uses the parameters. At the end of a round, which may be that of another
        optimizer, False: they cannot be used any more, and neither can this optimizer."""
        if self._unusable is None:
            try:
                self._refresh()
            except Error as error:
                if self._call is not None:
                    raise
                self._unusable = error
        return self._unusable is None

    def _refresh(self) -> None:
        """At the beginning of each step and unscale_, after hooks that may have replaced gradients or changed options.
        What would need another core, or another state, is not followed here."""
        if not self._has_present_parameters():
            raise self._parameters_changed()
        self._look()
        if self._has_moved():
            raise make("unsupported", "A hook has moved the parameters to another device during the step.")
        self._show_present()

    def _has_moved(self) -> bool:
        return bool(self._params) and self._params[0].device != self._device

    def _follow_state(self) -> None:
        self._adopt()
        if self._is_compact:
            self._forget_copies()

    def _show(self) -> None:
        self._follow_state()
        self._look()
        if self._has_moved():
            self._device = self._params[0].device
            if self._core.allocated() > 0:
                self._move()
        self._show_present()

    def _show_present(self) -> None:
        for g, group in enumerate(self.param_groups):
            options = self._options_of(group)
            if options != self._options[g]:
                self._core.set_options(g + 1, options)  # group 0 of the core is empty
                self._options[g] = options
        if not self._settled:
            self._rebind(with_gradients=True)
        self._follow_written()

    def _has_present_parameters(self) -> bool:
        present: list[torch.Tensor] = []
        for group in self.param_groups:
            present += group["params"]
        return self._places.same(present, self._params)

    def _follow_groups(self) -> None:
        """Takes the parameters that a framework has put in place of others before the first step, as Accelerate does
        with FSDP2."""
        if self._has_present_parameters():
            return
        if self._core.allocated() > 0:
            raise self._parameters_changed()
        self._start()
        for group in self.param_groups:
            self._add_to_core(group)

    @staticmethod
    def _parameters_changed() -> Error:
        return make("unsupported", "The parameters of a group were changed after the first step; add new ones as a new "
                    "group, or make a new optimizer.")

    def _move(self) -> None:
        """Moves masters, moments and steps to the device where the parameters are now, as after ``model.to()``."""
        self._fill_state()
        saved = self._saved()
        kept = self._call, self._labels, self._names_revision, self._counted
        self._start()
        for group in self.param_groups:
            self._add_to_core(group)
        if any(saved):
            with torch.no_grad():
                self._take(saved)
        self._call, self._labels, self._names_revision, self._counted = kept
        self._settled = False

    def _look(self) -> None:
        moved, weights_moved, written = self._places.look(self._params, bool(self._held) and not self._is_compact)
        self._settled = self._settled and not moved
        self._weights_moved = self._weights_moved or weights_moved
        self._written += written

    def _follow_written(self) -> None:
        for i in self._written:
            self._core.follow_weight(i, self._stream(self._params))
        self._written.clear()

    def _follow(self) -> None:
        """Updates the core's views of weights, and masters from weights that were written to in any way."""
        self._look()
        if not self._settled:
            self._rebind(with_gradients=False)
        self._written = list(range(len(self._params)))
        self._follow_written()

    def refresh_masters(self) -> None:
        """Copies the values of 16-bit weights to their masters, after writes of few elements that torch's version
        counter does not show: through ``.data``, NumPy or custom kernels. Moments are unchanged."""
        self._follow()
        for i in range(len(self._params)):
            self._core.refresh_master(i, self._stream(self._params))

    def _rebind(self, with_gradients: bool) -> None:
        bound: list[tuple[str, Optional[View], Optional[View], bool]] = []
        counted = self._counted or [True] * len(self._params)
        replaced = False  # gradients: a new one may be where _look() has seen the old one
        for label, whole in zip(self._labels, self._params):
            param, view = local_of(whole, label), None
            grad = None if whole.grad is None or not with_gradients else local_grad(whole, label)
            check_whole(label, param, grad)
            if grad is not None:
                if grad.is_sparse or grad.stride() != param.stride():
                    dense = grad.detach().to_dense() if grad.is_sparse else grad.detach()
                    # In the order of the weight, and in place of the old one.
                    grad = torch.empty_like(param.detach(), dtype=grad.dtype).copy_(dense)
                    whole.grad = like(whole, grad)
                    replaced = True
                view = view_of(grad)
                if view is None:
                    raise make("unsupported", f"The gradient of {label} is of a type or on a device "
                               "that Headroom does not have; use torch's optimizers for it.")
            weight = view_of(param)
            if weight is None:
                raise make("unsupported", f"{label} is not a dense FP16, BF16 or FP32 tensor any more; "
                           "make a new optimizer for it.")
            bound.append((label, weight, view, counted[len(bound)]))
        if self._weights_moved:
            self._reorder()
        self._core.rebind(bound, self._stream(self._params))
        if self._weights_moved:
            self._held = self._with_masters(self._params)
        self._weights_moved = False
        self._settled = with_gradients and not replaced
        if with_gradients:
            self._stepped = [i for i, param in enumerate(self._params) if _has_gradient(param)]

    def _with_masters(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        kept = params if self._precision[0] else []
        return [local(param).detach() for param in kept if param.dtype is not torch.float32]

    def _reorder(self) -> None:
        """Permutes masters and moments of weights whose strides have changed."""
        changed = {}
        params = [local(param) for param in self._params]
        for i, (param, (shape, stride)) in enumerate(zip(params, self._layouts)):
            if param.shape != shape:
                raise make("mismatch", f"{self._labels[i]} had shape {tuple(shape)} and has "
                           f"{tuple(param.shape)} now; make a new optimizer for it.")
            if param.stride() != stride:
                changed[i] = []
        if changed and self._is_compact and self._core.allocated() > 0:
            raise make("unsupported", f"The memory format of {self._labels[min(changed)]} has changed, which state "
                       f"'{self._precision[3]}' cannot follow; make a new optimizer and load the state dict of this one.")
        for _, memory, i in self._core.state()[1] if changed else ():  # none before the first step
            if i in changed and params[i].numel() > 0:
                changed[i].append(torch.from_dlpack(memory))
        for i, buffers in changed.items():
            shape, stride = self._layouts[i]
            now = params[i].stride()
            fresh = [torch.empty_strided(shape, now, dtype=flat.dtype, device=flat.device).copy_(
                flat.as_strided(shape, stride)) for flat in buffers]
            for flat, values in zip(buffers, fresh):  # cannot fail
                flat.copy_(values.as_strided((flat.numel(),), (1,)))
            self._layouts[i] = (shape, now)
        if changed:
            self._changes += 1  # what `state` shows has the old strides

    @keep_eager
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """One step, after the closure if there is one. GradScaler.step() calls this."""
        if not self._is_watched():
            return self._step(closure)
        return self._watched_step() if closure is None else self._watched_step(closure)

    step.hooked = True  # prevents torch from wrapping it for hooks and profilers, which is slow

    def _is_watched(self) -> bool:
        if type(self).step is not FusedOptimizer.step:
            return False  # torch has wrapped the subclass's step
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        )

    def _step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._call is None:
            self._bind()
        if not self._stepped and self._call is None:
            return loss
        stream = self._stream(self._params)
        scale = self._number(getattr(self, "grad_scale", None))
        found = self._number(getattr(self, "found_inf", None))
        call, max_norm = self._call, self.max_norm
        if call is None and self._sharded and max_norm > 0.0 and all_zero(self._params):
            max_norm = 0.0  # torch.distributed.checkpoint makes state by such a step
        if call is not None and (scale is not None or found is not None):
            raise make("unsupported", "The optimizer has a grad_scale or found_inf of its own beside that of headroom.torch."
                       "GradScaler; set them to None, or multiply the loss by the factor.")
        if call is None and self._sharded and (scale is not None or found is not None or max_norm > 0.0):
            raise make("unsupported", "The parameters are sharded, and this step would be skipped or clipped by this "
                       "process's shards alone; use headroom.torch.GradScaler, which asks all processes.")
        if call is not None:
            call.scaler.step(self._core, call.max_norm or max_norm, call.skip_above_norm, "never", call.stream)
            call.counted = True
        elif scale is None and found is None and max_norm == 0.0:
            self._core.apply(1.0, stream=stream)
        else:
            self._own_scaler().step(
                self._core,
                max_norm,
                clear_grads="never",
                stream=stream,
                external_scale=0 if scale is None else scale.data_ptr(),
                external_found_inf=0 if found is None else found.data_ptr(),
            )
        self._changes += 1
        increment_versions([self._params[i] for i in self._stepped])
        self._places.advance(self._stepped)
        return loss

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)

    def report(self) -> _core.StepReport:
        """What the last step under torch's scaler, or with ``max_norm`` and no scaler, did. Waits for a CUDA
        device. Our scaler has a report() of its own."""
        return self._own_scaler().report()

    def _number(self, given: Any) -> Optional[torch.Tensor]:
        """Converts to an FP32 tensor on the device of the parameters."""
        if given is None:
            return None
        device = self._params[0].device
        if isinstance(given, torch.Tensor) and given.dtype is torch.float32 and given.device == device:
            return given
        return torch.as_tensor(given, dtype=torch.float32, device=device)

    def _own_scaler(self) -> _core.GradScaler:
        """What measures, decides and applies under torch's scaler or none, with the scale that step() is given.
        On a CUDA device all of it is enqueued."""
        if self._scaler is None:
            device = self._params[0].device
            place = device.index if device.type == "cuda" else -1
            policy = _core.preset("dynamic")
            self._scaler = _core.GradScaler(policy, False, place, None, self._stream(self._params))
        return self._scaler


def _has_gradient(param: torch.Tensor) -> bool:
    return param.grad is not None and local(param).numel() > 0
