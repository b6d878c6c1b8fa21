#!/usr/bin/env python3
"""Times the step (unscale, clip, AdamW, update) with each format of optimizer state on a CUDA device, beside FlashOptim
(if it is installed) and torch's fused AdamW, with BF16 weights and gradients, and the memory that each takes: medians of
single steps in alternation, by device events.

    PYTHONPATH=build/gpu/python python3 bench/state.py [MODEL ...]
"""

import gc
import statistics
import sys
from functools import partial

import torch

import headroom.torch as ours
from pytorch import clip_in_step, elapsed_ms, gpt2, make_scaler, resnet50

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


class Setup:
    """Weights, gradients and an optimizer. Each has its own: an optimizer follows weights that another one has written,
    which takes time."""

    def __init__(self, sizes, dtype, make):
        self.params = [torch.nn.Parameter((torch.randn(n, device="cuda") * 0.02).to(dtype)) for n in sizes]
        for p in self.params:
            p.grad = torch.empty_like(p)
        self.work = make(self.params)
        self.count = sum(sizes)
        self.times = []

    def state_bytes(self, reset):
        before = torch.cuda.memory_allocated()
        reset(self.params)
        self.work()
        return (torch.cuda.memory_allocated() - before) / self.count

    def step(self, reset):
        alone = elapsed_ms(lambda: reset(self.params))
        self.times.append(elapsed_ms(lambda: (reset(self.params), self.work())) - alone)


def kinds_of(dtype):
    options = dict(lr=1e-6, weight_decay=0.1)

    def ours_with(state):
        return lambda params: partial(clip_in_step, make_scaler(ours.GradScaler),
                                      ours.AdamW(params, state=state, **options), params)

    kinds = {f"ours, {state}": ours_with(state) for state in ("full", "half", "byte")}
    if dtype == torch.float32:
        return kinds
    # Neither has a scaler for 16-bit gradients or skips a bad step; without masters, torch's loses small updates.
    kinds["torch fused, clip, 16-bit states"] = lambda params: partial(
        clip_and_step, torch.optim.AdamW(params, fused=True, **options), params)
    if FlashAdamW is not None:
        kinds["FlashOptim"] = lambda params: FlashAdamW(params, **options).step
        kinds["FlashOptim, clip"] = lambda params: partial(clip_and_step, FlashAdamW(params, **options), params)
    return kinds


def measure(name, sizes, dtype):
    source = [(torch.randn(n, device="cuda") * 65.0).to(dtype) for n in sizes]

    def reset(params):
        torch._foreach_copy_([p.grad for p in params], source)

    setups = {kind: Setup(sizes, dtype, make) for kind, make in kinds_of(dtype).items()}
    taken = {kind: setup.state_bytes(reset) for kind, setup in setups.items()}
    for i in range((12 if sum(sizes) > 1e9 else 30) + 5):
        for setup in list(setups.values())[:: -1 if i % 2 else 1]:
            setup.step(reset)
    for kind, setup in setups.items():
        ms = statistics.median(setup.times[5:])
        what = str(dtype).removeprefix("torch.")
        print(f"{name:12}{what:10}{kind:34}{ms:9.3f} ms   {taken[kind]:6.2f} bytes of state a parameter", flush=True)


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
