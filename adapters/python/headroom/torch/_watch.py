"""The range watch: which operation leaves FP16's range first, what is close to it, and what to do."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from headroom import _core
from headroom._errors import make
from headroom.torch._memory import stream_of
from headroom.torch._trace import Trace

_MOST_FORWARDS = 4  # of one watched step; with more, their backward is not coming


class Watch:
    """Watches every ``every``-th training step of a model, from the first on: ``watch(model)``.

    A watched step measures the result of every operation of the forward pass and of the loss, and every gradient of
    backward, on the device and without waiting. Other steps pay for two hooks of the model."""

    def __init__(
        self,
        model: torch.nn.Module,
        every: int = 50,
        *,
        on_report: Optional[Callable[[_core.RangeReport], None]] = None,
        rows: int = 16384,
    ) -> None:
        if every < 0:
            raise make("invalid argument", f"every is {every}; it has to be 0 (only after next_step() and alarms) or more.")
        if not hasattr(torch.compiler, "set_stance") and any(map(_is_compiled, model.modules())):
            raise make("unsupported", "A compiled model can be watched with PyTorch 2.6 and later.")
        if model._compiled_call_impl is not None:
            raise make("unsupported", "model.compile() has replaced the call of this model, which would compile the "
                       "watch, too; use torch.compile(model) and watch its result.")
        self._model = model
        self._every = every
        self._on_report = on_report
        self._steps = 0
        self._wanted = False
        self._table = _core.RangeTable(rows)
        for device in {param.device for param in model.parameters() if param.is_cuda}:
            self._table.prepare(device.index, stream_of(device))
        self._trace: Optional[Trace] = None  # of the step that is being watched
        self._finished: Optional[Trace] = None  # whose table is on its way to the host
        self._read: Optional[Trace] = None  # of which no report was made yet
        self._latest: Optional[_core.RangeReport] = None
        self._entries: dict[int, tuple[str, torch.nn.Module]] = {}  # of the list of running modules, by id
        self._sharded: list[torch.nn.Module] = []  # by FSDP2
        self._forwards = 0
        self._has_backward = False  # the step that is being watched
        self._backward: Optional[_BackwardHook] = None
        self._step_hooks: list[Any] = []
        self._stance: Any = None
        self._warned_of_capture = False
        self._hooks = [
            model.register_forward_pre_hook(_ModelHook(self._before_forward), with_kwargs=True, prepend=True),
            model.register_forward_pre_hook(_ModelHook(self._resume)),
        ]

    # What the user calls.

    def next_step(self) -> None:
        """Watches the next forward pass, with the backward pass that follows it."""
        self._wanted = True

    def on_alarm(self, report: _core.AlarmReport) -> None:
        """For ``GradScaler(..., on_alarm=watch.on_alarm)``: warns, and watches the next step."""
        warnings.warn(f"{report} The next step is watched.", RuntimeWarning, stacklevel=2)
        self.next_step()

    def report(self) -> _core.RangeReport:
        """What the last watched step found. Waits for its device."""
        if self._trace is not None:
            self._finish()
        self._collect()
        report = self._newest()
        if report is None:
            raise make("wrong order", "No step was watched yet.")
        return report

    def try_report(self) -> Optional[_core.RangeReport]:
        """The newest report that can be had without waiting; None if there is none."""
        if self._trace is None and self._table.ready():
            self._collect()
        return self._newest()

    def remove(self) -> None:
        """Stops watching. Reports remain."""
        if self._trace is not None:
            self._finish()
        for hook in self._hooks:
            hook.remove()

    # Steps.

    def _before_forward(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_nested():
            return
        self._steps += torch.is_grad_enabled()
        if self._trace is not None:
            self._forwards += 1
            if self._forwards > _MOST_FORWARDS:
                self._finish()
        elif self._on_report is not None and self._finished is not None and self._table.ready():
            self._collect()
        due = self._every > 0 and torch.is_grad_enabled() and (self._steps - 1) % self._every == 0
        if self._trace is None and (due or self._wanted) and not self._is_captured():
            self._begin()
        if self._trace is not None:
            self._trace.core.name_inputs(_named_arguments(model, args, kwargs))

    def _is_nested(self) -> bool:
        """Whether the model is called by itself."""
        return self._trace is not None and any(module is self._model for _, module in self._trace.modules)

    def _is_captured(self) -> bool:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return False
        if not self._warned_of_capture:
            warnings.warn("A forward pass in a CUDA graph is not watched: replays run no Python, and would measure "
                          "every time. Run the step once without the graph to watch it.", RuntimeWarning, stacklevel=3)
            self._warned_of_capture = True
        return True

    def _begin(self) -> None:
        self._wanted = False
        if self._table.ready():
            self._collect()
        self._finished = None
        self._forwards = 1
        self._has_backward = torch.is_grad_enabled()
        self._table.begin(_core.CURRENT_STREAMS)
        modules = dict(self._model.named_modules())
        self._sharded = sharded = [module for module in modules.values() if _is_sharded(module)]
        self._entries = {id(entry[1]): entry for entry in modules.items()}
        self._trace = Trace(self._table, modules, bool(sharded) or (dist.is_available() and dist.is_initialized()))
        self._step_hooks = [
            self._model.register_forward_hook(_ModelHook(self._after_forward), always_call=True),
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        for module in sharded:
            if module is not self._model:
                self._step_hooks += [module.register_forward_pre_hook(_ModelHook(self._resume)),
                                     module.register_forward_hook(_ModelHook(self._resume), always_call=True)]
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            # Compiled code has no operations to see: this step runs eagerly. Nothing is compiled again.
            self._stance = torch.compiler.set_stance("force_eager")
        self._enter_module(self._model, None)
        _insert(self._trace)
        self._backward = _BackwardHook(self._end_forward, self._finish)

    def _after_forward(self, model: torch.nn.Module, args: Any, result: Any) -> None:
        if self._trace is None or torch.compiler.is_compiling():
            return
        if not self._has_backward:
            self._finish()

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if self._trace is not None:
            modules = self._trace.modules
            # Modules that the model does not list belong to their caller.
            modules.append(self._entries.get(id(module)) or (modules[-1][0] if modules else "", module))
            if self._sharded:
                self._trace.paused = _is_sharded(module)

    def _leave_module(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self._trace is not None and self._trace.modules:
            self._trace.modules.pop()
            if self._sharded:
                self._trace.paused = _is_sharded(module) and module is not self._model

    def _resume(self, *args: Any) -> None:
        """Runs after FSDP's hooks, which gather and free parameters: copies that are no operations of the model."""
        if self._trace is not None:
            self._trace.paused = False

    def _end_forward(self) -> None:
        if self._trace is not None:
            _take_out(self._trace)
            self._trace.core.end_forward()
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks.clear()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _finish(self) -> None:
        """Enqueues the copy of the table to the host, once nothing more will be measured."""
        if self._trace is None:
            return
        self._end_forward()
        if self._backward is not None:
            self._backward.remove()
            self._backward = None  # which refers to this object: without a cycle, its memory is freed at once
        trace = self._trace.core
        trace.stop()
        if trace.unmeasured:
            warnings.warn(f"The table of the watch was full before the end of the step: {trace.unmeasured} tensors "
                          "were not measured. Make it larger: Watch(model, rows=...).", RuntimeWarning, stacklevel=2)
        self._table.finish(_core.CURRENT_STREAMS)
        self._finished, self._trace = self._trace, None

    def _collect(self) -> None:
        """Reads the table, waiting for it if need be."""
        if self._finished is not None:
            self._finished.core.read()
            self._read, self._finished = self._finished, None
            if self._on_report is not None:
                self._on_report(self._newest())  # type: ignore[arg-type]

    def _newest(self) -> Optional[_core.RangeReport]:
        if self._read is not None:
            self._latest = self._read.core.report()
            self._read = None
        return self._latest


def watch(
    model: torch.nn.Module,
    every: int = 50,
    *,
    on_report: Optional[Callable[[_core.RangeReport], None]] = None,
) -> Watch:
    """Watches every ``every``-th training step of the model, from the first on; 0 watches only after
    ``next_step()`` and after alarms of a scaler (``on_alarm=watch.on_alarm``).

    ``report()`` says which operation first gave inf or NaN, what is within 3 doublings of FP16's limit, and what
    to do. ``on_report`` is called with each report by a later forward pass, when it can be had without waiting.

    >>> import torch, headroom.torch
    >>> class Gated(torch.nn.Module):
    ...     def forward(self, x):
    ...         return (x * 300).half() * x.half()
    >>> model = torch.nn.Sequential(Gated())
    >>> watch = headroom.torch.watch(model)
    >>> _ = model(torch.full((2,), 20.0))
    >>> str(watch.report().first_bad), watch.report().inputs_finite, watch.report().islands()
    ('0: mul', True, ['0'])
    """
    return Watch(model, every, on_report=on_report)


def _is_compiled(module: torch.nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _is_sharded(module: torch.nn.Module) -> bool:
    return hasattr(type(module), "set_requires_gradient_sync")  # FSDP2's FSDPModule


def _named_arguments(model: torch.nn.Module, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """The tensors that the model is called with, by the names of its parameters."""
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        names = []
    names += [f"argument {i}" for i in range(len(names), len(args))]
    named = []
    for name, value in (*zip(names, args), *kwargs.items()):
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
        named += [(name, value), *((f"{name}[{key!r}]", item) for key, item in inner)]
    return named


class _ModelHook:
    """A hook of a watched model. Copies and pickles of the model are not watched: theirs does nothing."""

    def __init__(self, function: Optional[Callable[..., None]] = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> Any:
        return _ModelHook, ()


class _BackwardHook:
    """Calls ``before`` and ``after`` the next backward pass that this thread starts. Torch has no hook for that which
    runs in the thread of the program: until then it replaces the functions that start one. Several watches may do so,
    and end in any order."""

    _lock = threading.Lock()

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = before, after
        self._thread = threading.get_ident()
        self._active = True
        self._replacements: list[Any] = []
        with self._lock:
            for place in _HAVE_BACKWARD:
                place.backward = self._replacement(place.backward)

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self._active or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self.remove()
            self._before()
            try:
                return original(*args, **kwargs)
            finally:
                self._after()

        backward._headroom_hook = self  # type: ignore[attr-defined]
        self._replacements.append(backward)
        return backward

    def _has_ended(self, function: Any) -> bool:
        return not self._active and any(function is each for each in self._replacements)

    def remove(self) -> None:
        self._active = False
        with self._lock:
            for place in _HAVE_BACKWARD:
                function: Any = place.backward
                while hasattr(function, "_headroom_hook") and function._headroom_hook._has_ended(function):
                    function = function.__wrapped__
                place.backward = function


_HAVE_BACKWARD: tuple[Any, ...] = (torch.Tensor, torch.autograd)


# The mode stays on after the forward pass, to see the loss. It is put at the bottom of torch's stack of modes, so
# that a mode which the program leaves in between takes itself off, not ours. torch.device's mode insists on being
# the lowest.


def _stack() -> list[TorchFunctionMode]:
    """Takes all modes off the stack and returns them, the lowest first."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    return modes[::-1]


def _insert(mode: TorchFunctionMode) -> None:
    modes = _stack()
    place = 1 if modes and type(modes[0]).__name__ == "DeviceContext" else 0
    for each in (*modes[:place], mode, *modes[place:]):
        torch._C._push_on_torch_function_stack(each)


def _take_out(mode: TorchFunctionMode) -> None:
    for each in _stack():
        if each is not mode:
            torch._C._push_on_torch_function_stack(each)
