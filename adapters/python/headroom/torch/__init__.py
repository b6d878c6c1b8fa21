"""Headroom for PyTorch. The module does not link libtorch: tensors are passed as pointers.

``GradScaler`` replaces ``torch.amp.GradScaler``; ``AdamW``, ``SGD`` and ``Lion`` are torch optimizers that update in one
pass over memory.

>>> import torch, headroom.torch
>>> model = torch.nn.Linear(4, 1).bfloat16()
>>> optimizer = headroom.torch.AdamW(model.parameters(), lr=1e-3, max_norm=1.0)
>>> scaler = headroom.torch.GradScaler("cpu")
>>> loss = model(torch.ones(8, 4, dtype=torch.bfloat16)).float().square().mean()
>>> scaler.scale(loss).backward()
>>> scaler.step(optimizer)
>>> scaler.update()
>>> scaler.last_step_applied
True
"""

import torch

if not hasattr(torch.amp, "GradScaler"):
    raise ImportError(f"headroom.torch needs PyTorch 2.3 or later; this is {torch.__version__}.")

from headroom.torch._checkpoint import load, save
from headroom.torch._islands import keep_fp32
from headroom.torch._recorder import Recorder, advise
from headroom.torch._rules import SGD, AdamW, Lion
from headroom.torch._scaler import GradScaler
from headroom.torch._state_fit import StateFit, state_fit
from headroom.torch._watch import Watch, watch

__all__ = ["SGD", "AdamW", "GradScaler", "Lion", "Recorder", "StateFit", "Watch", "advise", "keep_fp32", "load", "save",
           "state_fit", "watch"]
