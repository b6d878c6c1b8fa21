#!/usr/bin/env python3
"""Writes torch_optim.golden, the weights after torch.optim steps that optimizer_test.cc compares with.
The inputs are fractions that C++ computes with the same bits. Needs PyTorch; run manually."""
import sys

import torch

COUNT, STEPS = 19, 20
CASES: dict[str, tuple] = {
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "sgd_decay": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.01)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    "sgd_dampening": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01)),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adam": (torch.optim.Adam, dict(lr=0.01)),
    "adam_decay": (torch.optim.Adam, dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01)),
    "adamw_decay": (torch.optim.AdamW, dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)),
}


def weight(i):
    return ((i * 37) % 101 - 50) / 50


def grad(i, step):
    return (((i * 53 + step * 29) % 97) - 48) / 480


out = open(sys.argv[1], "w") if len(sys.argv) > 1 else sys.stdout
print(f"# torch {torch.__version__}: weights after {STEPS} steps", file=out)
for name, (kind, options) in CASES.items():
    w = torch.nn.Parameter(torch.tensor([weight(i) for i in range(COUNT)], dtype=torch.float32))
    optimizer = kind([w], **options)
    for step in range(STEPS):
        w.grad = torch.tensor([grad(i, step) for i in range(COUNT)], dtype=torch.float32)
        optimizer.step()
    print(name, *(f"{x:.9g}" for x in w.detach().tolist()), file=out)
