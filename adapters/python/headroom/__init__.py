"""Headroom: loss scaling for mixed-precision training.

>>> import headroom, numpy as np
>>> headroom.measure([np.ones(4, np.float16)]).norm
2.0

``headroom.torch`` has a drop-in for ``torch.amp.GradScaler`` and fused optimizers for PyTorch.
"""

from headroom._core import (
    AlarmReport,
    GradStats,
    OnOverflow,
    ScalePolicy,
    StepReport,
    Tensor,
    UnscaleResult,
    cuda_available,
    num_threads,
    preset,
    presets,
    set_num_threads,
    simd_target,
)
from headroom._core import version as __version__
from headroom._errors import Error, InvalidArgument
from headroom._optim import SGD, Adam, AdamW, Optimizer
from headroom._scaler import GradScaler, measure, unscale_
from headroom._tensor import tensor

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "AlarmReport",
    "Error",
    "GradScaler",
    "GradStats",
    "InvalidArgument",
    "OnOverflow",
    "Optimizer",
    "ScalePolicy",
    "StepReport",
    "Tensor",
    "UnscaleResult",
    "__version__",
    "cuda_available",
    "measure",
    "num_threads",
    "preset",
    "presets",
    "set_num_threads",
    "simd_target",
    "tensor",
    "unscale_",
]
