"""Recorder, write_report, diagnose, and advise for arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Optional, Union

from headroom import _core
from headroom._tensor import tensor

Path = Union[str, "os.PathLike[str]"]


def write_report(folder: Path, path: Path = "") -> list[str]:
    """Writes the report of the run in ``folder``, or of all runs below it, to ``path`` (by default
    ``report.html`` in the folder). Returns a sentence for each run that had to be left out."""
    return _core.write_report(os.fspath(folder), os.fspath(path))


def diagnose(folder: Path) -> _core.Diagnosis:
    """Says what is wrong with the loss scaling of the run in ``folder`` and what to change, as ``headroom diagnose``
    does. Print the result. The run may still be training. docs/diagnose.md lists the rules."""
    found = _core.diagnose(os.fspath(folder))
    if len(found) > 1:
        raise ValueError(f"There are {len(found)} runs below '{os.fspath(folder)}'; name the folder of one.")
    return found[0]


def advise(grads: Iterable[Any], format: str = "fp16", lose: float = 1e-3, margin: int = 3) -> _core.ScaleAdvice:
    """Picks a static scale for unscaled gradients: the largest one stays 2^margin times below overflow, and at
    most the share ``lose`` becomes zero. ``format`` is "fp16", "bf16", "e5m2" or "e4m3".

    >>> import numpy as np
    >>> advice = advise([np.array([1e-9, 1e-7, 1e-5])])
    >>> advice.verdict, advice.scale
    ('scale', 8388608.0)
    """
    magnitudes = _core.Magnitudes()
    for grad in grads:
        magnitudes.add(tensor(grad))
    return magnitudes.advise(format, lose, margin)


class Recorder:
    """Writes the history of a run to a folder: ``history.jsonl``, at the end ``report.html``, and with
    ``tensorboard=True`` an event file. Every step is on disk as soon as it is recorded. ``settings`` are shown in the
    report; diagnose() uses "precision" ("fp16", "bf16" or "fp32") among them. With ``resume=True`` an existing history is
    continued; ``rewind(step)`` drops what a checkpoint
    does not have.

    >>> import tempfile, os, headroom, numpy as np
    >>> weight, grad = np.zeros(4, np.float32), np.ones(4, np.float32)
    >>> optimizer, scaler = headroom.SGD({"w": (weight, grad)}, lr=0.1), headroom.GradScaler()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Recorder(folder, policy=scaler.policy) as recorder:
    ...         loss = scaler.scale(1.0)
    ...         recorder.step(1, 0.5, scaler.step(optimizer), lr=0.1)
    ...     sorted(os.listdir(folder))
    ['history.jsonl', 'report.html']
    """

    def __init__(
        self,
        folder: Path,
        *,
        policy: Optional[_core.ScalePolicy] = None,
        name: str = "",
        group: str = "",
        settings: Optional[Mapping[str, Any]] = None,
        tensorboard: bool = False,
        resume: bool = False,
    ) -> None:
        self._folder = os.fspath(folder)
        self._settings = [(key, str(value)) for key, value in (settings or {}).items()]
        self._core: Optional[_core.Recorder] = _core.Recorder(
            self._folder, name, group, policy or _core.ScalePolicy("torch"), self._settings, tensorboard, resume)

    def _open(self) -> _core.Recorder:
        if self._core is None:
            raise ValueError("The Recorder was used after finish(); make a new one.")
        return self._core

    def step(self, step: int, loss: float, report: _core.StepReport, **more: float) -> None:
        """Records one step; numbers increase from call to call."""
        self._open().step(step, float(loss), report, [(key, float(value)) for key, value in more.items()])

    def layers(self, step: int, scale: float, grads: Mapping[str, Any]) -> None:
        """Records where the gradients of a step lie in FP16's range. They are multiplied by ``scale``."""
        measured = [(name, *_core.measure_detail([tensor(grad)])) for name, grad in grads.items()]
        self._open().layers(step, scale, measured)

    def settings(self, **changed: Any) -> None:
        """Records other settings from here on: ``precision="bf16"``."""
        kept = [(key, value) for key, value in self._settings if key not in changed]
        self._settings = kept + [(key, str(value)) for key, value in changed.items()]
        self._open().settings(self._settings)

    def note(self, step: int, text: str) -> None:
        """Records a remark for the reader of the report."""
        self._open().note(step, text)

    def rewind(self, step: int) -> None:
        """Drops everything after ``step``."""
        self._open().rewind(step)

    def diagnose(self) -> _core.Diagnosis:
        """What diagnose() says about the run so far."""
        return diagnose(self._folder)

    def finish(self, how: str = "finished", **results: float) -> None:
        """Writes how the run ended, and the report. Nothing can be recorded afterwards."""
        core = self._open()
        core.finish([(key, float(value)) for key, value in results.items()], how)
        self._core = None
        write_report(self._folder)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        """Finishes the run, unless finish() was called. After an exception the history says which one."""
        if self._core is not None:
            self.finish("finished" if kind is None else f"stopped by {kind.__name__}: {error}")
