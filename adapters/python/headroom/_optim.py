"""SGD, Adam, AdamW and Lion for arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

from headroom import _core
from headroom._tensor import tensor

Params = Union[Mapping[str, tuple[Any, Any]], Iterable[tuple[Any, Any]]]


class Optimizer:
    """The base of SGD, Adam, AdamW and Lion.

    ``params`` are pairs (weight, gradient), in a list or in a dict by name; a gradient may be None.
    Weights of float16 and bfloat16 have float32 masters inside, unless ``master_weights`` is False.
    ``stochastic_rounding`` applies to bfloat16 weights. ``state`` is how masters and moments are stored: "full",
    "half" or "byte", see docs/state.md. The arrays are used in place and kept alive.
    """

    _kind: Any

    def __init__(
        self,
        params: Params,
        options: dict[str, Any],
        *,
        master_weights: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        state: str = "full",
    ) -> None:
        self._core = self._kind(master_weights, stochastic_rounding, seed, state)
        # Stored at the core object: views of the state keep that alive, even after this object is gone.
        self._kept: list[list[Optional[_core.Tensor]]] = []
        self._core.kept = self._kept
        self._names: set[str] = set()
        self._groups: list[dict[str, Any]] = []
        self._defaults = options
        self.add_group(params)

    def add_group(self, params: Params, **options: Any) -> int:
        """Adds parameters with their own options and returns the index of the new group."""
        unknown = options.keys() - self._defaults.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {sorted(unknown)[0]!r}")
        options = self._defaults | options
        # Parameters in a list are named by the next free numbers.
        free = (i for i in itertools.count(len(self._kept)) if str(i) not in self._names)
        named = params.items() if isinstance(params, Mapping) else zip(free, params)
        triples = []
        for name, (weight, grad) in named:
            triples.append((str(name), tensor(weight), None if grad is None else tensor(grad)))
        names = [name for name, _, _ in triples]
        if len({*names, *self._names}) < len(names) + len(self._names):
            raise ValueError("two parameters have the same name; state() needs different names")
        self._core.add_group(triples, options, 0)
        self._names.update(names)
        self._kept += [[weight, grad] for _, weight, grad in triples]
        self._groups.append(options)
        return len(self._groups) - 1

    def set_options(self, group: int = 0, **options: Any) -> None:
        """Changes some options of a group: ``optimizer.set_options(lr=1e-4)``."""
        group = range(len(self._groups))[group]
        changed = self._groups[group] | options
        if changed.keys() != self._groups[group].keys():
            raise TypeError(f"the options are {', '.join(self._groups[group])}")
        self._core.set_options(group + 1, changed)  # group 0 of the core is empty
        self._groups[group] = changed

    def options(self, group: int = 0) -> dict[str, Any]:
        """A copy of the options of a group."""
        return dict(self._groups[group])

    def set_grad(self, index: int, grad: Optional[Any]) -> None:
        """Replaces the gradient of a parameter, for loops that allocate new ones; None removes it."""
        view = None if grad is None else tensor(grad)
        self._core.set_grad(index, view)
        self._kept[index][1] = view

    def zero_grad(self) -> None:
        """Writes zeros to all gradients."""
        self._core.zero_grad()

    def apply(self, multiplier: float = 1.0, clear_grads: bool = False) -> None:
        """One step with gradient x multiplier, without a scaler and without a check for inf and nan."""
        self._core.apply(multiplier, clear_grads)

    def steps(self, index: int = 0) -> int:
        """The number of applied steps of a parameter; skipped steps are not counted."""
        return self._core.steps(index, 0)

    def state(self) -> tuple[list[int], dict[str, _core.Tensor]]:
        """The step count of each parameter, and masters and moments by name.

        The tensors are views of the optimizer's memory; ``numpy.array(t)`` makes a copy. With ``state`` "half" or
        "byte" they are copies.
        """
        steps, tensors = self._core.state(0)
        return steps, {name: view for name, view, _ in tensors}

    def load_state(self, steps: list[int], tensors: Mapping[str, Any]) -> None:
        """Copies what ``state()`` returned. Raises headroom.Error, changing nothing, if it does not fit."""
        # The core expects its own order. If the names differ, it raises the error.
        expected = [name for name, _, _ in self._core.state(0)[1]]
        names = expected if set(expected) == tensors.keys() else tensors
        loaded = [(name, tensor(tensors[name]), 0) for name in names]
        self._core.load_state(steps, loaded, 0)


class SGD(Optimizer):
    """Stochastic gradient descent with torch.optim.SGD's formulas."""

    _kind = _core.SGD

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **precision: Any,
    ) -> None:
        options = dict(lr=lr, momentum=momentum, dampening=dampening)
        options |= dict(weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, options, **precision)


class Adam(Optimizer):
    """Adam with L2 regularization and torch.optim.Adam's formulas."""

    _kind = _core.Adam

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **precision: Any,
    ) -> None:
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, options, **precision)


class AdamW(Adam):
    """Adam with decoupled weight decay and torch.optim.AdamW's formulas.

    >>> import numpy as np
    >>> weight, grad = np.ones(3, np.float16), np.ones(3, np.float16)
    >>> optimizer = AdamW({"w": (weight, grad)}, lr=0.5, weight_decay=0.0)
    >>> optimizer.apply()
    >>> weight
    array([0.5, 0.5, 0.5], dtype=float16)
    """

    _kind = _core.AdamW

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **precision: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **precision)


class Lion(Optimizer):
    """Lion (arXiv 2302.06675): steps by the sign of an interpolation of momentum and gradient."""

    _kind = _core.Lion

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **precision: Any,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), **precision)
