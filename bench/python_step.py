#!/usr/bin/env python3
"""Times one step of scaler and AdamW on the CPU, alternating PyTorch's and Headroom's within one run.

    OMP_NUM_THREADS=2 PYTHONPATH=build/release/python python3 bench/python_step.py
"""

import time

import torch

import headroom.torch

SHAPES = {"20 x 16": ((16,), 20, 200), "400 x 256": ((256,), 400, 60), "48 x 768 x 768": ((768, 768), 48, 25)}
PAIRS = {
    "torch scaler, torch AdamW": (torch.amp.GradScaler, torch.optim.AdamW, {}),
    "headroom scaler, torch AdamW": (headroom.torch.GradScaler, torch.optim.AdamW, {}),
    "torch scaler, torch AdamW(fused)": (torch.amp.GradScaler, torch.optim.AdamW, {"fused": True}),
    "headroom scaler, torch AdamW(fused)": (
        headroom.torch.GradScaler, torch.optim.AdamW, {"fused": True}),
    "headroom scaler, headroom AdamW": (headroom.torch.GradScaler, headroom.torch.AdamW, {}),
}


ONE = torch.ones(())


def make_training(shape, count, scaler_class, optimizer_class, options):
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param) * 1000
    scaler = scaler_class("cpu")
    scaler.scale(torch.ones(()))
    return scaler, optimizer_class(params, **options)


def main() -> None:
    for name, (shape, count, repeats) in SHAPES.items():
        runs: dict = {pair: (make_training(shape, count, *how), []) for pair, how in PAIRS.items()}
        for _ in range(repeats):
            for (scaler, optimizer), times in runs.values():
                start = time.perf_counter()
                scaler.scale(ONE)
                scaler.step(optimizer)
                scaler.update()
                times.append(time.perf_counter() - start)
        for pair, (_, times) in runs.items():
            print(f"{name:16}{pair:38}{min(times) * 1e3:9.3f} ms")


if __name__ == "__main__":
    main()
