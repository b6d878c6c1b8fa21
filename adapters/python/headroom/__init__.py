"""Headroom: loss scaling for mixed-precision training.

>>> import headroom, numpy as np
>>> headroom.measure([np.ones(4, np.float16)]).norm
2.0

``headroom.torch`` is for PyTorch: a replacement of ``torch.amp.GradScaler`` and fused optimizers.
"""

from headroom import _variant  # noqa: F401, I001  first: it chooses headroom._core
from headroom._core import (
    AlarmReport,
    Diagnosis,
    DynamicScale,
    Finding,
    GradDetail,
    GradStats,
    HeadroomScale,
    RangeReport,
    RangeRow,
    RangeStats,
    ScaleAdvice,
    ScalePolicy,
    ScaleState,
    StaticScale,
    StepReport,
    Tensor,
    WeightReport,
    WeightTensor,
    cuda_available,
    num_threads,
    preset,
    presets,
    set_num_threads,
    simd_target,
)
from headroom._core import version as __version__
from headroom._errors import Error, InvalidArgument
from headroom._inspect import inspect
from headroom._optim import SGD, Adam, AdamW, Lion, Optimizer
from headroom._scaler import GradScaler, measure, measure_detail, unscale_
from headroom._tensor import tensor
from headroom._tools import Recorder, advise, diagnose, write_report

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "AlarmReport",
    "Diagnosis",
    "DynamicScale",
    "Error",
    "Finding",
    "GradScaler",
    "GradDetail",
    "GradStats",
    "HeadroomScale",
    "Lion",
    "InvalidArgument",
    "Optimizer",
    "RangeReport",
    "RangeRow",
    "RangeStats",
    "Recorder",
    "ScaleAdvice",
    "ScalePolicy",
    "ScaleState",
    "StaticScale",
    "StepReport",
    "Tensor",
    "WeightReport",
    "WeightTensor",
    "__version__",
    "advise",
    "cuda_available",
    "diagnose",
    "inspect",
    "measure",
    "measure_detail",
    "num_threads",
    "preset",
    "presets",
    "set_num_threads",
    "simd_target",
    "tensor",
    "unscale_",
    "write_report",
]
