#!/usr/bin/env python3
"""Times the step (unscale, clip, AdamW, update) with each format of optimizer state on a CUDA device, beside FlashOptim
(if it is installed) and torch's fused AdamW, with BF16 weights and gradients, and the memory that each takes: medians of
single steps in alternation, by device events.

    PYTHONPATH=build/gpu/python python3 bench/state.py [MODEL ...]
"""

import gc
import sys
from functools import partial

import torch

import headroom.torch as ours
from pytorch import alternating_ms, clip_in_step, gpt2, make_scaler, resnet50

try:
    from flashoptim import FlashAdamW
except ImportError:
    FlashAdamW = None


def lora():
    """Rank 16 on all linear layers of a model with 7 billion parameters: 448 tensors, 40 million."""
    sizes = []
    for _ in range(32):
        for out in (4096, 4096, 4096, 4096, 11008, 11008):
            sizes += [16 * 4096, 16 * out]
        sizes += [16 * 11008, 16 * 4096]
    return sizes


MODELS = {
    "resnet50": resnet50(),
    "gpt2-124M": gpt2(12, 768),
    "gpt2-xl": gpt2(48, 1600),
    "lora-7b": lora(),
}


def clip_and_step(optimizer, params):
    torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    optimizer.step()


def kinds_of(params, wide):
    options = dict(lr=1e-6, weight_decay=0.1)
    for state in ("full", "half", "byte"):
        optimizer = ours.AdamW(params, state=state, **options)
        yield f"ours, {state}", partial(clip_in_step, make_scaler(ours.GradScaler), optimizer, params)
    if wide:
        return
    # Neither has a scaler for BF16 or skips a bad step; without masters, torch's loses small updates.
    theirs = torch.optim.AdamW(params, fused=True, **options)
    yield "torch fused, clip, BF16 states", partial(clip_and_step, theirs, params)
    if FlashAdamW is not None:
        yield "FlashOptim", FlashAdamW(params, **options).step
        yield "FlashOptim, clip", partial(clip_and_step, FlashAdamW(params, **options), params)


def measure(name, sizes, dtype):
    params = [torch.nn.Parameter((torch.randn(n, device="cuda") * 0.02).to(dtype)) for n in sizes]
    source = [(torch.randn(n, device="cuda") * 65.0).to(dtype) for n in sizes]
    for p in params:
        p.grad = torch.empty_like(p)

    def reset():
        torch._foreach_copy_([p.grad for p in params], source)

    works, taken = {}, {}
    for kind, work in kinds_of(params, dtype == torch.float32):
        before = torch.cuda.memory_allocated()
        reset()
        work()
        taken[kind] = (torch.cuda.memory_allocated() - before) / sum(sizes)
        works[kind] = work
    times = alternating_ms(reset, works, 12 if sum(sizes) > 1e9 else 30)
    for kind, ms in times.items():
        what = str(dtype).removeprefix("torch.")
        print(f"{name:12}{what:10}{kind:32}{ms:9.3f} ms   {taken[kind]:6.2f} bytes of state a parameter", flush=True)


def main():
    print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}; FlashOptim: {FlashAdamW is not None}")
    for name in sys.argv[1:] or MODELS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype == torch.float16 and name != "gpt2-xl":
                continue  # as BF16
            measure(name, MODELS[name], dtype)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
