"""AdamW, SGD and Lion of the core as torch optimizers."""

from __future__ import annotations

from typing import Any

from headroom import _core
from headroom.torch._optim import FusedOptimizer


class AdamW(FusedOptimizer):
    """``torch.optim.AdamW``, fused; without amsgrad and maximize.

    >>> import torch, headroom.torch
    >>> weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    >>> optimizer = headroom.torch.AdamW([weight], lr=0.5, weight_decay=0.0)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> weight.tolist()
    [0.5, 0.5]
    """

    _kind = _core.AdamW
    _option_names = ("lr", "betas", "eps", "weight_decay")
    _buffers = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float = 0.0,
        master_weights: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        state: str = "full",
        **torchs: Any,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        precision = (master_weights, stochastic_rounding, seed, state)
        super().__init__(params, defaults, max_norm, precision, torchs)


class SGD(FusedOptimizer):
    """``torch.optim.SGD``, fused; without maximize. Whether momentum is 0 cannot change after construction."""

    _kind = _core.SGD
    _option_names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    _buffers = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        max_norm: float = 0.0,
        master_weights: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        state: str = "full",
        **torchs: Any,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening)
        defaults |= dict(weight_decay=weight_decay, nesterov=nesterov)
        precision = (master_weights, stochastic_rounding, seed, state)
        super().__init__(params, defaults, max_norm, precision, torchs)


class Lion(FusedOptimizer):
    """Lion (arXiv 2302.06675): steps by the sign of an interpolation of momentum and gradient, with decoupled weight
    decay. One moment instead of Adam's two."""

    _kind = _core.Lion
    _option_names = ("lr", "betas", "weight_decay")
    _buffers = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        max_norm: float = 0.0,
        master_weights: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        state: str = "full",
        **torchs: Any,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, weight_decay=weight_decay)
        precision = (master_weights, stochastic_rounding, seed, state)
        super().__init__(params, defaults, max_norm, precision, torchs)
