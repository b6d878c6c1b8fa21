#!/usr/bin/env python3
"""Times one scaled step (clipping, AdamW, update; FP32) on the CPU, alternating PyTorch's and Headroom's within one run.

    PYTHONPATH=build/release/python python3 bench/python_step.py --threads 2 [--no-clip] [MODEL ...]
"""

import argparse
import statistics
import time
from functools import partial

import torch

import headroom.torch
from pytorch import gpt2

MODELS = {"20 x 16": [16] * 20, "400 x 256": [256] * 400, "48 x 590k": [768 * 768] * 48, "gpt2-124M": gpt2(12, 768)}
STEPS = {"20 x 16": 200, "400 x 256": 60, "48 x 590k": 25, "gpt2-124M": 9}


def torch_step(scaler, optimizer, params, clip):
    scaler.scale(ONE)
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    scaler.step(optimizer)
    scaler.update()


def our_step(scaler, optimizer, params, clip):
    scaler.scale(ONE)
    scaler.step(optimizer, **({"max_norm": 1.0} if clip else {}))
    scaler.update()


ONE = torch.ones(())
OURS, TORCHS = headroom.torch, torch.optim
WAYS = {
    "torch's scaler, torch's AdamW": (torch.amp.GradScaler, torch_step, TORCHS.AdamW, {}),
    "our scaler,     torch's AdamW": (OURS.GradScaler, our_step, TORCHS.AdamW, {}),
    "torch's scaler, torch's fused AdamW": (torch.amp.GradScaler, torch_step, TORCHS.AdamW, {"fused": True}),
    "our scaler,     torch's fused AdamW": (OURS.GradScaler, our_step, TORCHS.AdamW, {"fused": True}),
    "our scaler,     our AdamW": (OURS.GradScaler, our_step, OURS.AdamW, {}),
    "our scaler,     our AdamW, half": (OURS.GradScaler, our_step, OURS.AdamW, {"state": "half"}),
    "our scaler,     our AdamW, byte": (OURS.GradScaler, our_step, OURS.AdamW, {"state": "byte"}),
}


def prepare(sizes, way, clip):
    """A function that puts the gradients back, which torch's unscaling changes, and one that steps."""
    scaler_class, step, optimizer_class, options = way
    params = [torch.nn.Parameter(torch.randn(size) * 0.02) for size in sizes]
    grads = [torch.randn(size) * 65.0 for size in sizes]
    for param in params:
        param.grad = torch.empty_like(param)

    def restore():
        for param, grad in zip(params, grads):
            param.grad.copy_(grad)

    optimizer = optimizer_class(params, lr=1e-6, weight_decay=0.1, **options)
    return restore, partial(step, scaler_class("cpu"), optimizer, params, clip)


def median_ms(sizes, steps, clip):
    ways = {name: prepare(sizes, way, clip) for name, way in WAYS.items()}
    taken = {name: [] for name in ways}
    for i in range(steps):
        for name, (restore, step) in list(ways.items())[:: -1 if i % 2 else 1]:
            restore()
            start = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[2:]) * 1e3 for name, times in taken.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", choices=[[], *MODELS], help="all by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-clip", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"PyTorch {torch.__version__}, {args.threads} threads, medians in ms")
    for model in args.model or MODELS:
        times = median_ms(MODELS[model], STEPS[model], not args.no_clip)
        base = times["torch's scaler, torch's fused AdamW"]
        for name, ms in times.items():
            print(f"{model:10}  {name:36}{ms:9.3f} ms  {base / ms:6.2f} times as fast as torch's, fused")


if __name__ == "__main__":
    main()
