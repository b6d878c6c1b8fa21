"""Records the steps of a GradScaler, and advises on a static scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Optional, Union

import torch

from headroom import _core
from headroom._errors import Error, make
from headroom._tools import Path
from headroom._tools import Recorder as ArrayRecorder
from headroom.torch._memory import local, stream_of, view_of
from headroom.torch._scaler import GradScaler


class Recorder(ArrayRecorder):
    """Writes the history of training under a GradScaler to a folder: ``history.jsonl``, ``report.html``, and with
    ``tensorboard=True`` an event file.

        with headroom.torch.Recorder("runs/a", scaler) as recorder:
            for batch in data:
                ...
                scaler.step(optimizer)
                scaler.update()
                recorder.step(loss, lr=scheduler.get_last_lr()[0])

    Every ``layers_every`` steps (0: never) the gradients of all parameters are measured, one by one. On CUDA a step is
    written when the next one begins: the host waits for the step before, never for the present one. In a job
    of several processes one of them records, and measures its own shards. The other options are those of
    ``headroom.Recorder``; ``first_step`` continues the numbers of a resumed run and drops later ones."""

    def __init__(
        self, folder: Path, scaler: GradScaler, *, layers_every: int = 50, first_step: int = 1, **options: Any
    ) -> None:
        super().__init__(folder, policy=scaler.policy, **options)
        if options.get("resume"):
            self.rewind(first_step - 1)
        self._scaler: Optional[GradScaler] = scaler
        self._layers_every = layers_every
        self._next = first_step
        self._measured = -1  # the step whose layers were recorded last
        self._waiting: Optional[tuple[int, torch.Tensor, Any, dict[str, float]]] = None
        self._alarmed = False  # update() has raised since the last step()
        scaler.recorder = self

    def step(self, loss: Union[torch.Tensor, float], **more: float) -> None:  # type: ignore[override]
        """Records the step that the scaler has just made. Call it after ``scaler.update()``."""
        self._open()
        self._write()
        self._alarmed = False
        value, copied = _to_host(loss)
        number, self._next = self._next, self._next + 1
        self._waiting = (number, value, copied, more)
        if copied is None:
            self._write()

    def before_step(self) -> bool:
        """The scaler calls this when a step begins. Returns whether it is to call measure()."""
        self._write()
        due = self._layers_every > 0 and (self._next - 1) % self._layers_every == 0
        return due and self._measured != self._next  # not for another attempt, or another optimizer

    def alarm(self) -> None:
        """The scaler calls this when ``update()`` raises: the loop may not come to step()."""
        self._alarmed = True

    def measure(self, optimizer: torch.optim.Optimizer, names: list[str], scale: float) -> None:
        """Records where gradients, which are in memory times ``scale``, lie in FP16's range."""
        self._measured = self._next
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._note_precision({param.dtype for param in params})
        measured = []
        for name, param in zip(names, params):
            grad = None if param.grad is None else local(param.grad)
            view = None if grad is None or grad.is_sparse else view_of(grad)
            if grad is not None and view is not None:
                measured.append((name, *_core.measure_detail([view], stream_of(grad.device))))
        self._open().layers(self._next, scale, measured)

    def _note_precision(self, dtypes: set[torch.dtype]) -> None:
        """Records the precision of a 16-bit model for diagnose(). FP32 parameters may be under autocast of any type."""
        known = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        found = [name for dtype, name in known.items() if dtype in dtypes]
        if len(found) == 1 and not any(key == "precision" for key, _ in self._settings):
            self.settings(precision=found[0])

    def _write(self) -> None:
        """Writes the step that waits, whose report is the scaler's last one."""
        if self._waiting is None:
            return
        (number, loss, copied, more), self._waiting = self._waiting, None
        assert self._scaler is not None
        alarm = None
        try:
            report = self._scaler.report()
        except Error as error:  # an alarm from the device, which is raised once
            alarm, report = error, self._scaler.report()
        if copied is not None:
            copied.synchronize()
        try:
            super().step(number, loss.item(), report, **more)
        except (TypeError, ValueError, RuntimeError):  # refused arguments, such as a loss of several elements
            if self._next == number + 1:
                self._next = number
            raise
        if alarm is not None:
            raise alarm

    def finish(self, how: str = "finished", **results: float) -> None:
        if self._alarmed:
            self.step(math.nan)
        self._write()
        if self._scaler is not None:
            self._scaler.recorder = None
            self._scaler = None
        super().finish(how, **results)


def _to_host(loss: Union[torch.Tensor, float]) -> tuple[torch.Tensor, Any]:
    """A copy of the loss in host memory, and the event after which it is there; None if it is there already."""
    if not isinstance(loss, torch.Tensor):
        return torch.tensor(float(loss), dtype=torch.float64, device="cpu"), None
    if not loss.is_cuda:
        return loss.detach().clone(), None
    copy = torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=True)
    copy.copy_(loss.detach().reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copy, event


def advise(
    model: Union[torch.nn.Module, Iterable[torch.Tensor]],
    scale: float = 1.0,
    format: str = "fp16",
    lose: float = 1e-3,
    margin: int = 3,
) -> _core.ScaleAdvice:
    """Picks a static scale by the gradients that a model, or its parameters, have now. They were made from a loss
    times ``scale``. FP32 gradients are best: those of FP16 have lost what underflows. The other arguments are
    those of ``headroom.advise``.

    >>> import torch, headroom.torch
    >>> layer = torch.nn.Linear(4, 1)
    >>> (layer(torch.ones(1, 4)).sum() * 1e-7).backward()
    >>> advice = headroom.torch.advise(layer)
    >>> scaler = headroom.torch.GradScaler("cpu", policy=f"static:scale={advice.scale}")
    """
    if not 0.0 < scale < math.inf:
        raise make("invalid argument", f"The scale of the loss is {scale:g}; pass a finite number above 0.")
    magnitudes = _core.Magnitudes()
    for param in model.parameters() if isinstance(model, torch.nn.Module) else model:
        if param.grad is not None:
            grad = local(param.grad.detach())
            grad = grad._values() if grad.is_sparse else grad
            unscaled = (grad.to("cpu", torch.float64) / scale).contiguous()
            magnitudes.add(view_of(unscaled))
    return magnitudes.advise(format, lose, margin)
