"""How a torch optimizer looks to the core: a list of gradients, and a way to step."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch

from headroom import _core
from headroom._errors import make
from headroom.torch._memory import View, check_whole, local_grad, local_of, places, view_of
from headroom.torch._ranks import is_sharded


class Names:
    """What reports call a parameter: its name in the model, or its place in the optimizer."""

    def __init__(self) -> None:
        # Of modules, not of parameters: model.to() and FSDP replace those, and torch cannot swap a tensor that has weak
        # references.
        self._modules: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        self.revision = 0  # grows with every change, so that bindings notice

    def add(self, module: torch.nn.Module) -> None:
        named = {id(each): (weakref.ref(each), f"{name}." if name else "") for name, each in module.named_modules()}
        others = [entry for entry in self._modules if entry[0]() is not None and id(entry[0]()) not in named]
        self._modules = [*named.values(), *others]
        self.revision += 1

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for reference, prefix in self._modules:
            module = reference()
            for name, param in module._parameters.items() if module is not None else ():
                if param is not None:
                    yield prefix + name, param

    def any_sharded(self) -> bool:
        """Whether this process has a part only of a named parameter."""
        return any(is_sharded(param) for _, param in self._parameters())

    def of_all(self, optimizer: torch.optim.Optimizer) -> list[str]:
        known: dict[int, str] = {}
        for name, param in self._parameters():
            known.setdefault(id(param), name)  # a shared parameter has its first name
        names = []
        for g, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")  # the optimizer was made from named_parameters()
            names += [known.get(id(param)) or (given[i] if given else f"param_groups[{g}].params[{i}]")
                      for i, param in enumerate(group["params"])]
        return names


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step() unscales and skips by itself, given ``grad_scale`` and ``found_inf``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def check_fp16(optimizer: torch.optim.Optimizer, policy: _core.ScalePolicy, call: str) -> None:
    """Raises, as torch's scaler does, before FP16 gradients are unscaled in place. ``step()`` leaves that to optimizers
    that take the scale. A scale that is always 1 divides nothing."""
    if call == "step()" and takes_scale(optimizer) or policy.rule == "static" and policy.scale == 1.0:
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    if not any(param.grad is not None and param.grad.dtype is torch.float16 for param in params):
        return
    change = ("use step(optimizer, max_norm=...) to clip them" if takes_scale(optimizer) else
              "use headroom.torch.AdamW, SGD or Lion, which keep FP32 masters, or FP32 parameters under autocast")
    raise make("invalid argument", f"Attempting to unscale FP16 gradients. {call} would divide them by the scale in FP16, "
               f"where small ones become 0: {change}.")


@dataclasses.dataclass
class Call:
    """The arguments of one GradScaler.step(), and what came of it."""

    scaler: _core.GradScaler
    stream: int
    max_norm: float
    skip_above_norm: float
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    numbers: Callable[[], list[torch.Tensor]]  # found_inf, divisor and norm
    result: Any = None  # of the optimizer's step()
    counted: bool = False  # the core has decided on it

    def run(self, optimizer: torch.optim.Optimizer) -> None:
        self.result = optimizer.step(*self.args, **self.kwargs)


class Binding(_core.CallbackOptimizer):
    """Any torch optimizer under the core's scaler.

    Ordinary optimizers: the core waits for the verdict, gradients are unscaled in place, and their own
    ``step()`` runs. Optimizers that take the scale themselves (torch's with ``fused=True``) get the divisor
    and the verdict as tensors; on a CUDA device the host does not wait for these.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._names_revision = -1
        self._params: list[torch.Tensor] = []
        self._labels: list[str] = []
        self._counted: Optional[list[bool]] = None
        self._places = places()
        self._present: list[torch.Tensor] = []  # parameters at the last look
        self._moved = False  # a gradient has since the views were made
        self._looked = False  # since the last step
        self._devices: Optional[set[torch.device]] = None
        self._views: list[View] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients, and dense copies of them
        self._call: Optional[Call] = None  # while step() runs
        # The contract before torch 1.13: the optimizer gets the scaler and does everything itself.
        self.wants_scaler = (
            takes_scale(optimizer) and "grad_scaler" in inspect.signature(optimizer.step).parameters
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # the caller of step() has it
        return optimizer

    def count(self, counted: Optional[list[bool]]) -> None:
        """Sets which gradients this process counts in the norm, if several decide together."""
        if counted is not self._counted:
            self._counted, self._params = counted, []

    def devices(self) -> set[torch.device]:
        """Where the gradients are. Ask before each step."""
        self._look()
        self._looked = not self.wants_scaler  # those step before the core looks
        if self._devices is None:
            self._devices = {param.grad.device for param in self._present if param.grad is not None}
        return self._devices

    def _look(self) -> None:
        self._present = [param for group in self.optimizer.param_groups for param in group["params"]]
        moved, _, _ = self._places.look(self._present, False)
        if moved or not self._places.same(self._present, self._params):
            self._moved, self._devices = True, None

    def step(self, call: Call) -> Any:
        """One step under the scaler. Returns what the optimizer's own step() did, None if it was skipped."""
        self._call = call
        try:
            call.scaler.step(self, call.max_norm, call.skip_above_norm, "never", call.stream)
            call.counted = True
            return call.result
        finally:
            self._call = None
            self._copies = []

    # What the core calls.

    def refresh(self) -> None:
        optimizer = self._optimizer()
        if optimizer is None:  # its gradients cannot be rescaled any more
            self._params, self._present, self._views, self._copies = [], [], [], []
            self.rebind([], 0)
            return
        if self._call is None or not self._looked:
            self._look()
        self._looked = False
        params = self._present
        same = self._places.same(params, self._params) and self._names_revision == self._names.revision
        if same and not self._moved and not self._copies:
            return
        self._params, self._views, self._copies = [], [], []  # if this raises, the next call binds everything
        counted = self._counted or [True] * len(params)
        bound: list[tuple[str, Optional[View], Optional[View], bool]] = []
        if not same:
            self._labels = self._names.of_all(optimizer)
        for name, param in zip(self._labels, params):
            view = None if param.grad is None else self._view(param, name)
            bound.append((name, None, view, counted[len(bound)]))
        self.rebind(bound, 0)
        self._params, self._names_revision, self._moved = params, self._names.revision, False

    def _view(self, param: torch.Tensor, name: str) -> View:
        grad = local_grad(param, name)
        check_whole(name, local_of(param, name), grad)
        if grad.is_sparse:
            if not grad.is_coalesced():
                param.grad = grad = grad.coalesce()  # the sum of duplicates has another norm, and may overflow
            grad = grad._values()
        view = view_of(grad)
        if view is None:
            dense = grad.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
            view = view_of(dense)
            self._copies.append((grad, dense))
        if view is None:
            raise make("unsupported", f"The gradient of {name} is a {type(grad).__name__} of {grad.dtype} on "
                       f"{grad.device}; Headroom takes FP16, BF16, FP32 and FP64 on the CPU and on CUDA devices.")
        self._views.append(view)
        return view

    def gradients_changed(self) -> None:
        with torch.no_grad():
            for grad, dense in self._copies:
                grad.copy_(dense)

    @property
    def _stream(self) -> int:
        return _core.CURRENT_STREAMS if self._call is None else self._call.stream

    def apply(self, multiplier: float, clear_grads: bool) -> None:
        assert self._call is not None
        if self.wants_scaler:
            return  # it has stepped already
        if takes_scale(self.optimizer):
            self._step_scaled(self._call, multiplier != 1.0)
            return
        if multiplier != 1.0:
            self._multiply(multiplier)
        try:
            self._call.run(self.optimizer)
        except BaseException:
            if multiplier != 1.0:
                self._multiply(1.0 / multiplier)
            raise

    def apply_on_device(self, verdict: int, clear_grads: bool, stream: int) -> bool:
        call = self._call
        assert call is not None
        if self.wants_scaler or not takes_scale(self.optimizer) or _lacks_momentum(self.optimizer):
            return False
        self._step_scaled(call, call.max_norm > 0.0 or not call.scaler.is_unscaled(self))
        return True

    def _step_scaled(self, call: Call, divide: bool) -> None:
        optimizer: Any = self.optimizer
        found_inf, divisor, _ = call.numbers()
        preset = getattr(optimizer, "grad_scale", None)  # a factor of the user's own
        if preset is not None:
            divisor = divisor * preset if divide else preset
        optimizer.grad_scale = divisor if divide or preset is not None else None
        optimizer.found_inf = found_inf
        try:
            call.run(optimizer)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _multiply(self, factor: float) -> None:
        _core.unscale_(self._views, factor, self._stream)
        self.gradients_changed()


def _lacks_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's fused SGD would make a momentum buffer in this step. Its kernel leaves the buffer
    uninitialised when the step is skipped, and the next step uses it: the host has to wait once."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        group["momentum"] != 0 and optimizer.state[param].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    )
