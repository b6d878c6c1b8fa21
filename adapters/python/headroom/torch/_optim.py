"""Torch optimizers that unscale, clip and update in one pass over memory."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from headroom import _core
from headroom._errors import Error, make
from headroom.torch._arguments import check_torch_arguments, not_ours, plain_option
from headroom.torch._binding import Call, Names
from headroom.torch._memory import (
    StepNumbers,
    View,
    check_whole,
    keep_eager,
    like,
    local,
    local_of,
    placed_like,
    places,
    stream_of,
    view_of,
)
from headroom.torch._ranks import is_sharded


class FusedOptimizer(torch.optim.Optimizer):
    """The base of AdamW and SGD.

    FP32 parameters are updated in place; FP16 and BF16 ones have FP32 masters inside, unless
    ``master_weights`` is False. If a weight is written to or loaded, its master is updated from it. Writes that
    torch's version counter does not show, through ``.data`` or NumPy, need ``refresh_masters()``. Under a
    GradScaler (Headroom's or torch's) gradients are unscaled in the pass that updates, and are not modified.
    ``max_norm`` clips their norm, over all groups, in the same pass; step() without a scaler then skips if there
    is inf or nan.
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
        master_weights: bool,
        stochastic_rounding: bool,
        seed: int,
        torchs: dict[str, Any],
    ) -> None:
        check_torch_arguments(type(self).__name__, torchs, max_norm)
        self.max_norm = max_norm
        self._precision = (master_weights, stochastic_rounding, seed)
        self._start()
        super().__init__(params, defaults)

    def _start(self) -> None:
        self._core = self._kind(*self._precision)
        self._options: list[dict[str, Any]] = []
        self._params: list[torch.Tensor] = []
        self._device: Optional[torch.device] = None  # of all parameters
        self._sharded = False  # this process has parts of parameters only
        self.counted: Optional[list[bool]] = None  # under our scaler with ranks: gradients that this one counts
        self._labels: list[str] = []
        self._held: list[torch.Tensor] = []  # memory of weights with masters, so that it is not reused
        self._layouts: list[tuple[Any, Any]] = []  # shapes and strides, which are the order of the core's memory
        self._places = places()
        self._has_masters = False
        self._written: list[int] = []  # parameters that others have written to
        self._settled = False  # the core's views are up to date
        self._weights_moved = False  # since the core's views were made
        self._changes = 0  # steps, loads and groups
        self._published = -1  # value of _changes when `state` was last filled
        self._stepped: list[int] = []  # parameters with a gradient
        self._scaler: Optional[_core.GradScaler] = None  # measures, decides and applies without ours
        self._call: Optional[Call] = None  # of our scaler, while its step runs
        self.numbers = StepNumbers()
        self._names_revision = -1
        refresh = weakref.WeakMethod(self._refresh)
        self._core.on_refresh = lambda: (refresh() or (lambda: None))()
        self._loading: Optional[dict[str, Any]] = None  # a state dict, while it is loaded

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
        self._has_masters = self._precision[0] and any(
            param.dtype is not torch.float32 for param in self._params
        )
        self._look()
        self._held += self._with_masters(group["params"])
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

    def bind(self, names: Names) -> _core.FusedOptimizer:
        """What our scaler steps, with everything as it is now. Reports use these names."""
        if names.revision != self._names_revision:
            self._names_revision = names.revision
            self._labels = [names.of(param, group, g, i) for g, group in enumerate(self.param_groups)
                            for i, param in enumerate(group["params"])]
            self._settled = False
        self._bind()
        return self._core

    def _refresh(self) -> None:
        if self._call is None:  # else step() has just bound everything
            self._bind()

    def step_under(self, call: Call) -> Any:
        """A step under our scaler. It goes through step(), for the sake of hooks and of those who patched it."""
        self._call = call
        try:
            call.run(self)
            return call.result
        finally:
            self._call = None

    @property
    def core(self) -> _core.FusedOptimizer:
        return self._core

    @property
    def device(self) -> torch.device:
        return self._params[0].device

    def _bind(self) -> None:
        """Shows the core memory and options as they are now."""
        params = [param for group in self.param_groups for param in group["params"]]
        if not self._places.same(params, self._params):
            raise make("unsupported", "The parameters of a group were changed after the optimizer was "
                       "made; add new ones as a new group, or make a new optimizer.")
        for g, group in enumerate(self.param_groups):
            options = self._options_of(group)
            if options != self._options[g]:
                self._core.set_options(g + 1, options)  # group 0 of the core is empty
                self._options[g] = options
        self._look()
        if self._weights_moved and self._params and self._params[0].device != self._device:
            self._move()
        if not self._settled:
            self._rebind(with_gradients=True)
        self._follow_written()

    def _move(self) -> None:
        """Moves masters, moments and steps to the device where the parameters are now, as after ``model.to()``."""
        self._fill_state()
        saved = [dict(self.state.get(param, {})) for param in self._params]
        kept = self._call, self._labels, self._names_revision
        self._start()
        for group in self.param_groups:
            self._add_to_core(group)
        if any(saved):
            with torch.no_grad():
                self._take(saved)
        self._call, self._labels, self._names_revision = kept
        self._settled = False

    def _look(self) -> None:
        moved, weights_moved, written = self._places.look(self._params, self._has_masters)
        self._settled = self._settled and not moved
        self._weights_moved = self._weights_moved or weights_moved
        self._written += written

    def _follow_written(self) -> None:
        for i in self._written:
            self._core.follow_weight(i, self._stream(self._params))
        self._written.clear()

    def _follow(self) -> None:
        """Updates the core's views of weights, and masters from weights that were written to."""
        self._look()
        if not self._settled:
            self._rebind(with_gradients=False)
        self._follow_written()

    def refresh_masters(self) -> None:
        """Copies the values of 16-bit weights to their masters, after writes that torch's version counter does
        not show: through ``.data``, NumPy or custom kernels. Moments are unchanged."""
        self._follow()
        for i in range(len(self._params)):
            self._core.refresh_master(i, self._stream(self._params))

    def _rebind(self, with_gradients: bool) -> None:
        bound: list[tuple[str, Optional[View], Optional[View], bool]] = []
        counted = self.counted or [True] * len(self._params)
        for label, whole in zip(self._labels, self._params):
            param, view = local_of(whole, label), None
            grad = None if whole.grad is None or not with_gradients else local_of(whole.grad, label)
            check_whole(label, param, grad)
            if grad is not None:
                if grad.is_sparse or grad.stride() != param.stride():
                    dense = grad.detach().to_dense() if grad.is_sparse else grad.detach()
                    # In the order of the weight, and in place of the old one.
                    grad = torch.empty_like(param.detach(), dtype=grad.dtype).copy_(dense)
                    whole.grad = like(whole, grad)
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
        self._settled = with_gradients
        if with_gradients:
            self._stepped = [i for i, param in enumerate(self._params) if _has_gradient(param)]

    def _with_masters(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """The memory of weights with masters. It is kept alive so that after ``.data = other`` no new weight can
        have the same address."""
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
        for _, memory, i in self._core.state()[1] if changed else ():
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
        call = self._call
        if call is None and self._sharded and (scale is not None or found is not None or self.max_norm > 0.0):
            raise make("unsupported", "The parameters are sharded, and this step would be skipped or clipped by this "
                       "process's shards alone; use headroom.torch.GradScaler, which asks all processes.")
        if call is not None:
            max_norm = call.max_norm or self.max_norm
            call.scaler.step(self._core, max_norm, call.skip_above_norm, "never", call.stream)
            call.counted = True
        elif scale is None and found is None and self.max_norm == 0.0:
            self._core.apply(1.0, stream=stream)
        else:
            self._own_scaler().step(
                self._core,
                self.max_norm,
                clear_grads="never",
                stream=stream,
                external_scale=0 if scale is None else scale.data_ptr(),
                external_found_inf=0 if found is None else found.data_ptr(),
            )
        self._changes += 1
        increment_version([self._params[i] for i in self._stepped])
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

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state in torch's format: steps, and views of the core's memory."""
        if self.__dict__.get("_changes", 0) != self.__dict__.get("_published", 0):
            self._fill_state()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self.__dict__["state"] = value

    def _publish(self) -> None:
        """Fills ``state``, after updating masters from the present weights."""
        try:
            self._follow()
        except Error:
            pass  # weights cannot be read now: use the state of the last step
        self._fill_state()

    def _fill_state(self) -> None:
        self._published = self._changes
        steps, tensors = self._core.state()
        for param, count in zip(self._params, steps):
            if count == 0:
                self.state.pop(param, None)
            else:
                step = torch.tensor(float(count), dtype=torch.float32, device="cpu")
                self.state[param]["step"] = step
        for label, memory, i in tensors:
            param = self._params[i]
            if steps[i] > 0:
                view = torch.from_dlpack(memory).as_strided(*self._layouts[i])
                self.state[param][_torch_name(label)] = like(param, view)

    def state_dict(self) -> dict[str, Any]:
        """Torch's format plus ``master``, the FP32 values of 16-bit weights."""
        self._publish()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads our state dict or that of torch's optimizer of the same name. Weights are unchanged; masters
        that are missing or do not round to the weights are set from them."""

        def keep_state(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            self._loading = given
            return {**given, "state": {}}  # torch would convert moments to 16 bits

        for mine, saved in zip(self.param_groups, state_dict["param_groups"]):
            names, theirs = mine.get("param_names"), saved.get("param_names")
            if names is not None and theirs is not None and list(names) != list(theirs):
                raise make("bad state", f"The saved state is of parameters {theirs}; this group has {names}. Moments are "
                           "taken over by place: list the parameters in the same order.")
        before = [dict(group) for group in self.param_groups]
        last = self.register_load_state_dict_pre_hook(keep_state)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            if self._loading is not None:  # the state was not loaded
                for group, old in zip(self.param_groups, before):
                    group.clear()
                    group.update(old)
            raise
        finally:
            last.remove()
            self._loading = None

    def _take(self, saved: list[dict[str, Any]]) -> None:
        self._bind()
        _, tensors = self._core.state()
        steps, kept, loaded = [], [], []
        for state in saved:
            buffers = any(state.get(name) is not None for name in self._buffers)
            steps.append(int(state.get("step", 1 if buffers else 0)))
        for label, _, i in tensors:
            param, name = self._params[i], _torch_name(label)
            value = saved[i].get(name)
            if value is None and name == "master":
                value = param
            memory = torch.zeros_like(local(param), dtype=torch.float32)
            if value is not None:
                if value.shape != param.shape:
                    raise make("bad state", f"The saved {label} has shape {tuple(value.shape)}; this "
                               f"parameter has {tuple(param.shape)}.")
                memory.copy_(local(placed_like(param, value)))
            kept.append(memory)
            loaded.append((label, view_of(memory), i))
        # The core writes masters to the weights. Restore the weights, which torch does not load here either;
        # masters that do not round to them are updated by the next step.
        weights = [(param, param.detach().clone()) for param in self._with_masters(self._params)]
        self._core.load_state(steps, loaded, self._stream(self._params))
        increment_version(self._params)
        for param, values in weights:
            param.copy_(values)
        self._changes += 1

    def __getstate__(self) -> dict[str, Any]:
        self._publish()
        state = super().__getstate__()
        return {**state, "max_norm": self.max_norm, "_precision": self._precision}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        given = self.__dict__.get("_loading")
        if given is not None:
            keys = [key for group in given["param_groups"] for key in group["params"]]
            self._take([given["state"].get(key, {}) for key in keys])
            self._loading = None
        if "_core" not in self.__dict__:  # unpickled or copied
            saved = self.__dict__["state"]
            self._start()
            for group in self.param_groups:
                self._add_to_core(group)
            with torch.no_grad():
                self._take([dict(saved.get(param, {})) for param in self._params])


def _has_gradient(param: torch.Tensor) -> bool:
    return param.grad is not None and local(param).numel() > 0


def _torch_name(label: str) -> str:
    """The name in torch's state dict of a state tensor of the core, such as "w/momentum"."""
    name = label.rpartition("/")[2]
    return "momentum_buffer" if name == "momentum" else name
