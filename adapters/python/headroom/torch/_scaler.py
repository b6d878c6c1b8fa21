"""torch.amp.GradScaler's interface over the core's GradScaler: converts tensors, settings and state."""

from __future__ import annotations

import functools
import json
import warnings
import weakref
from collections import abc, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from headroom import _core
from headroom._errors import Error, make
from headroom.torch._arguments import check_device, policy_of
from headroom.torch._backward import UnscaledGradients
from headroom.torch._binding import Binding, Call, Names, check_fp16
from headroom.torch._memory import StepNumbers, keep_eager, local, stream_of, tensor_at
from headroom.torch._optim import FusedOptimizer
from headroom.torch._ranks import RankGroup, check_ranks, ranks_over
from headroom.torch._settings import ScalerSettings


class GradScaler(ScalerSettings):
    """Scales losses, unscales gradients, skips bad steps, adapts the scale.

    A drop-in for ``torch.amp.GradScaler``: the same constructor, methods, state dict and pickles, and without
    ``policy`` the same scales. Beyond it:

    * ``policy``: any preset or policy, such as ``"headroom"`` or ``"torch:growth_interval=500"``; with one
      that retries, ``attempts()`` runs a batch again instead of losing it.
    * ``report()``, ``try_report()`` and ``last_step_applied`` say whether the last step ran and which parameter
      was at fault. Names come from ``model``, from ``name_parameters()``, or from an optimizer that was made
      with ``named_parameters()``.
    * ``ranks``: the processes that decide together: a process group, a DeviceMesh, or True for all. By default
      all do where parameters are sharded (DTensor, FSDP), and none otherwise. ``gradients="sharded"`` says that
      ordinary tensors, too, are each process's own part; otherwise equal names and shapes mean copies.
    * ``step(optimizer, max_norm=1.0)`` clips in the same pass.
    * Impossible scales are refused, gradients are checked again after ``unscale_``, and calls in an order that would
      mix scales are refused or handled. docs/python.md has the list. FP16 gradients need AdamW, SGD or Lion of this
      package, or torch's fused optimizers; others would unscale them to 0.

    >>> import torch, headroom.torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> scaler = headroom.torch.GradScaler("cpu", model=layer)
    >>> scaler.scale(layer(torch.tensor([[1.0, float("inf")]])).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> print(scaler.report(), "->", scaler.get_scale())
    skipped at scale 65536: weight: 1 inf, 0 nan -> 32768.0
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Union[_core.ScalePolicy, str, None] = None,
        model: Optional[torch.nn.Module] = None,
        ranks: Any = "auto",
        gradients: Optional[str] = None,
        on_alarm: Optional[Callable[[_core.AlarmReport], None]] = None,
    ) -> None:
        check_device(device)
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warnings.warn(
                "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=2
            )
            enabled = False
        self._device = device
        self._enabled = enabled
        self._follows_torch = policy is None
        given = dict(init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
                     growth_interval=growth_interval)
        self._on_alarm = on_alarm
        check_ranks(ranks, gradients)
        self._ranks, self._gradients = ranks, gradients
        self._begin(policy_of(policy, given, enabled))
        if model is not None:
            self.name_parameters(model)

    def _begin(self, policy: _core.ScalePolicy) -> None:
        given = set(self.__dict__)
        self.recorder: Any = None  # set by headroom.torch.Recorder
        self._core = _core.GradScaler(policy, self._enabled, -1, self._on_alarm, 0)
        self._place: Optional[torch.device] = None  # where the scale is, once a loss was scaled
        self._scale_view: Optional[torch.Tensor] = None
        self._names = Names()
        self._together = RankGroup(self._ranks, self._gradients)
        self._loss_elsewhere = False  # loss_fn() was made, but not called here: a stage of a pipeline without a loss
        self._assumed = -1  # the round in which such a stage took it that the loss was scaled
        self._bindings: weakref.WeakKeyDictionary[Any, Binding] = weakref.WeakKeyDictionary()
        # Not in the bindings: the views keep these, and with them parameters, alive.
        self._step_numbers: weakref.WeakKeyDictionary[Any, StepNumbers] = weakref.WeakKeyDictionary()
        self._uncounted = False  # the last step() raised, or a hook prevented it: update() has nothing to go by
        self._update_due = False  # update_later() was called
        self._last: Optional[weakref.ref[Any]] = None  # the optimizer that was stepped last
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(_refresh_per_optimizer_state)
        self._unscaled = UnscaledGradients()
        self._init_growth_tracker = self._get_growth_tracker()  # torch's name for the count that was loaded
        self._made_anew = frozenset({*self.__dict__, "_made_anew"} - given)

    def name_parameters(self, module: torch.nn.Module) -> None:
        """From now on reports call the module's parameters by their names."""
        self._names.add(module)

    # Scaling.

    def scale(self, outputs: Any) -> Any:
        """loss x scale, of a tensor or of every tensor in nested lists and tuples. FP16 and BF16 losses become
        FP32, because the scaled loss may not fit into 16 bits."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return self._scale_one(outputs)
        if isinstance(outputs, abc.Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def loss_fn(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """``function`` with its loss scaled, for schedules that compute the loss and call backward themselves
        (``torch.distributed.pipelining``). Make it on every rank; the schedule calls it on those that have a loss."""
        self._loss_elsewhere = True

        @functools.wraps(function)
        def scaled(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._loss_elsewhere = False
            return self.scale(function(*args, **kwargs))

        return scaled

    @keep_eager
    def _scale_one(self, loss: torch.Tensor) -> torch.Tensor:
        self._update_if_due()
        if self._scale_view is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        assert self._scale_view is not None
        # A product with the scale is FP32 already if the loss has no dimensions.
        wide = loss.float() if loss.dim() > 0 and loss.is_floating_point() and loss.element_size() < 4 else loss
        # A copy: backward needs the factor after an update may have moved the scale.
        scaled = wide * self._scale_view.clone().to(loss.device, non_blocking=True)
        self._core.loss_scaled()
        if loss.is_cuda and torch.cuda.is_current_stream_capturing():
            self._core.assume_losses()
        if scaled.requires_grad:  # gradients exist once backward has run
            scaled.register_hook(functools.partial(_gradients_added, self._core, self._core.round, self._unscaled))
        return scaled

    def _lazy_init_scale_growth_tracker(self, dev: Union[torch.device, str]) -> None:
        dev = torch.device(dev)
        if dev.type == "cuda":
            dev = torch.device("cuda", torch.cuda.current_device() if dev.index is None else dev.index)
            state = self._core.state()
            self._core = _core.GradScaler(
                self._core.policy, self._enabled, dev.index, self._on_alarm, stream_of(dev))
            self._core.load(state)
        elif dev.type != "cpu":
            raise make("unsupported", f"The loss is on {dev}; headroom.torch.GradScaler works on the CPU and on "
                       "CUDA devices. Use torch.amp.GradScaler there.")
        self._set_place(dev)

    def _set_place(self, device: torch.device) -> None:
        self._place = device
        self._scale_view = tensor_at(self._core.scale_address(), device, self._core)

    def _check_started(self, call: str, optimizer: Optional[torch.optim.Optimizer] = None) -> None:
        if self._scale_view is None and self._loss_elsewhere and optimizer is not None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._lazy_init_scale_growth_tracker(local(params[0]).device if params else self._device)
        if self._scale_view is None:
            raise AssertionError(f"Attempted {call} but _scale is None.  This may indicate your script did not use "
                                 "scaler.scale(loss or outputs) earlier in the iteration.")

    @property
    def _scale(self) -> Optional[torch.Tensor]:
        return self._scale_view

    @property
    def _growth_tracker(self) -> Optional[torch.Tensor]:
        if self._place is None:
            return None
        return torch.tensor(self._get_growth_tracker(), dtype=torch.int32, device=self._place)

    # Steps.

    @keep_eager
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, in place, to clip or inspect them before ``step()``. FP16 gradients are
        refused, as by torch: small ones would become 0. ``step(optimizer, max_norm=...)`` clips with one pass less."""
        if not self._enabled:
            return
        self._check_started("unscale_", optimizer)
        check_fp16(optimizer, self.policy, "unscale_()")
        self._unscaled.check(optimizer)
        core = self._bound(optimizer)
        if isinstance(optimizer, FusedOptimizer):
            optimizer._refresh()  # which raises here, and not in what the core calls
        self._core.unscale_(core, self._stream)
        self._unscaled.add(optimizer, core)
        self._note(optimizer, core, OptState.UNSCALED)

    @keep_eager
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: Optional[float] = None,
        skip_above_norm: float = 0.0,
        **kwargs: Any,
    ) -> Any:
        """Measures the gradients, decides, and applies or skips ``optimizer.step(*args, **kwargs)``.

        ``max_norm`` clips the norm of the unscaled gradients, and the norm before clipping is returned, as a
        tensor that nobody waits for. ``skip_above_norm`` skips a step whose norm is above it. Without
        ``max_norm`` the result is that of ``optimizer.step()``, None for a skipped one."""
        closure = kwargs.get("closure", args[0] if args else None)
        if not self._enabled and closure is not None:
            return optimizer.step(*args, **kwargs)  # a closure may run several times
        if self._enabled:
            if closure is not None:
                raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
            self._check_started("step", optimizer)
            if self._update_due and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
                self._update_if_due()  # it is in a round of its own
            check_fp16(optimizer, self.policy, "step()")
            self._unscaled.check(optimizer)
        core = self._bound(optimizer)
        if self.recorder is not None and self.recorder.before_step():
            scale = 1.0 if self._core.is_unscaled(core) else self.get_scale()
            self.recorder.measure(optimizer, self._names.of_all(optimizer), scale)
        if self._together.group is None and not _has_gradients(optimizer):
            if not self._enabled:
                return optimizer.step(*args, **kwargs)
            if not self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:  # set by unscale_()
                raise AssertionError("No inf checks were recorded for this optimizer.")
        numbers = functools.partial(self._numbers, optimizer, core)
        call = Call(self._core, self._stream, max_norm or 0.0, skip_above_norm, args, kwargs, numbers)
        try:
            if isinstance(optimizer, FusedOptimizer):
                result = optimizer.step_under(call)
            elif core.wants_scaler:
                result = self._step_with_itself(optimizer, core, call)
            else:
                result = core.step(call)
        except Error:
            if self._enabled or call.counted or max_norm or isinstance(optimizer, FusedOptimizer):
                raise
            return optimizer.step(*args, **kwargs)  # gradients that only torch's optimizers take, as complex ones
        finally:
            self._uncounted = not call.counted
        self._last = weakref.ref(optimizer)
        self._note(optimizer, core, OptState.STEPPED)
        return result if max_norm is None else self._numbers(optimizer, core)[2].clone()

    def _step_with_itself(self, optimizer: torch.optim.Optimizer, core: Binding, call: Call) -> Any:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near future "
            "GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and let the "
            "optimizer use them directly.",
            FutureWarning,
            stacklevel=3,
        )
        result = optimizer.step(*call.args, **call.kwargs, grad_scaler=self)
        core.step(call)
        return result

    def _bound(self, optimizer: torch.optim.Optimizer) -> Any:
        """The object that represents the optimizer in the core."""
        self._join(optimizer)
        if self._loss_elsewhere and self._together.group is not None and self._assumed != self._core.round:
            self._core.gradients_added(self._core.round)  # by the backward of a loss that another process has scaled
            self._assumed = self._core.round
        counted = self._together.counted(optimizer)
        core: Any
        if isinstance(optimizer, FusedOptimizer):
            core = optimizer.core_for(self._names, counted)
            devices = {optimizer.device} - {None}
        else:
            core = self._bindings.get(optimizer)
            if core is None:
                core = self._bindings[optimizer] = Binding(optimizer, self._names)
            core.count(counted)
            devices = core.devices()
        if devices - {self._place}:
            self._decide_on_host()
        return core

    def _decide_on_host(self) -> None:
        """For gradients in several places, and for ranks that communicate on the host."""
        if self._place is not None and self._place.type == "cuda":
            self._core.move_to_host()
            self._set_place(torch.device("cpu"))

    def _join(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets the processes decide together if they have to, before the first use of an optimizer."""
        if not self._together.join(optimizer, self._names, not self._loss_elsewhere):
            return
        ranks = ranks_over(self._together.group)
        if not ranks.enqueues:
            self._decide_on_host()
        self._core.set_ranks(ranks, not self._together.replicated)

    @property
    def _stream(self) -> int:
        if self._place is not None and self._place.type == "cuda":
            return stream_of(self._place)
        return _core.CURRENT_STREAMS

    def _numbers(self, optimizer: torch.optim.Optimizer, core: Any) -> list[torch.Tensor]:
        """found_inf, divisor and norm of the optimizer's last unscale_ or step."""
        return self._step_numbers.setdefault(optimizer, StepNumbers()).of(self._core, core, self._place or torch.device("cpu"))

    def _note(self, optimizer: torch.optim.Optimizer, core: Any, stage: OptState) -> None:
        """For code that reads torch's private table. The rules of call order are the core's."""
        if self._enabled and self._core.numbers_of(core):  # 0: a hook prevented the step
            found = self._numbers(optimizer, core)[0]
            checked = stage is OptState.STEPPED or _has_gradients(optimizer) or self._together.group is not None
            self._per_optimizer_states[id(optimizer)] = {
                "stage": stage, "found_inf_per_device": {found.device: found} if checked else {}}

    @keep_eager
    def update(self, new_scale: Union[float, torch.Tensor, None] = None) -> None:
        """Moves the scale by what the steps since the last update found, or sets it."""
        if not self._enabled:
            return
        self._check_started("update")
        due, self._update_due = self._update_due, False
        if due and new_scale is not None:
            self.update()
        if new_scale is not None:
            self._set_scale(new_scale)
        else:
            try:
                self._core.update(self._stream)
            except BaseException as error:
                if not isinstance(error, Error) or error.code != "wrong order":
                    self._end_round()  # an alarm, or on_alarm has raised: the update is done
                    if self.recorder is not None:
                        self.recorder.alarm()
                    raise
                if not self._uncounted:
                    self._per_optimizer_states.clear()
                    raise AssertionError(f"No inf checks were recorded prior to update. {error}") from None
        self._end_round()

    def _end_round(self) -> None:
        self._uncounted = False
        self._unscaled.end_round()
        self._per_optimizer_states.clear()

    def update_later(self) -> None:
        """For loops that call ``update()`` after the step of each optimizer: makes one update for all that step after
        one backward, before the next loss is scaled or the state dict is read; ``get_scale()`` is that of before."""
        self._update_due = self._enabled

    def _update_if_due(self) -> None:
        if self._update_due:
            self.update()

    def _set_scale(self, new_scale: Union[float, torch.Tensor]) -> None:
        if isinstance(new_scale, torch.Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise AssertionError("new_scale should be a float or a 1-element tensor that needs no gradient.")
            new_scale = new_scale.item()
        self._core.set_scale(float(new_scale), self._stream)

    def _load(self, state: dict[str, Any]) -> None:
        try:
            self._core.load(json.dumps(state))
        except Error as error:
            if error.code == "wrong order":
                raise make(error.code, str(error).replace("load()", "load_state_dict()")) from None
            raise make("invalid argument", str(error)) if error.code == "bad state" else error from None
        self._init_growth_tracker = self._get_growth_tracker()

    def attempts(self) -> Iterator[int]:
        """For policies that retry (``policy="headroom-retry"``): runs the body of a loop again while the batch
        overflowed and a lower scale may help.

            for attempt in scaler.attempts():
                optimizer.zero_grad()
                scaler.scale(loss_of(model, batch)).backward()
                scaler.step(optimizer)
                scaler.update()
        """
        attempt, round = 0, -1
        while round < self._core.round and (attempt == 0 or self._core.retry()):  # no update: the body has given up
            round = self._core.round
            yield attempt
            attempt += 1

    # What happened.

    def report(self) -> _core.StepReport:
        """What the last step did. Waits for a CUDA device."""
        return self._core.report()

    def try_report(self) -> Optional[_core.StepReport]:
        """The newest step that is done, without waiting; None if there is none."""
        return self._core.try_report()

    @property
    def last_step_applied(self) -> bool:
        """Whether the last step ran. Waits for a CUDA device."""
        return (self._last is None and not self._enabled) or self.report().applied

    def was_applied(self, optimizer: torch.optim.Optimizer) -> bool:
        """False if the last step of this optimizer was skipped. Waits for a CUDA device."""
        while optimizer not in self._bindings and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # a framework's wrapper
        core: Any = optimizer._core if isinstance(optimizer, FusedOptimizer) else self._bindings.get(optimizer)
        known = core is not None and self._core.numbers_of(core)
        return not (known and self._numbers(optimizer, core)[0].item())

    def discard(self) -> None:
        """Call after gradients of scaled losses were dropped without a step."""
        self._core.discard()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


@keep_eager
def _gradients_added(core: _core.GradScaler, round: int, unscaled: UnscaledGradients, grad: torch.Tensor) -> None:
    core.gradients_added(round)
    unscaled.backward_began(core)
